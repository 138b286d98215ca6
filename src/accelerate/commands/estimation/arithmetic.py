"""How many bytes a rank needs to train with Adam, and any process to run a model. `docs/guides/estimate-memory.md` derives it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from accelerate.commands.estimation.inventory import Inventory, Item

# Beside its weights, inference needs room for activations, the cache of keys and values, and the library's workspace.
INFERENCE_FACTOR = 1.2

STRATEGIES = ("ddp", "fsdp", "shard_grad_op", "zero1", "zero2", "zero3")
# Those element types that a model can be trained in, with the bytes of a number in the forward and backward pass.
COMPUTE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# Numbers that DeepSpeed reduces at a time (reduce_bucket_size), if it is not told otherwise.
_ZERO_BUCKET = 500_000_000
# bitsandbytes: a scale of 4 bytes for each row of 8-bit weights, and for each 64 weights of 4 bits.
_SCALE_BYTES = 4
_BLOCK_4BIT = 64


@dataclass(frozen=True)
class Training:
    """What a rank holds at the fullest moment of a step, activations left out.

    Attributes:
        strategy: how the ranks share the work.
        dtype: what the passes compute in; "float16" and "bfloat16" stand for mixed precision.
        processes: how many ranks there are.
        weights: bytes of the weights that the rank keeps, and of all buffers.
        gradients: bytes of the gradients that it keeps.
        optimizer: bytes of Adam's two moments, and of the fp32 weights that ZeRO keeps beside the others.
        working: bytes of what comes and goes within a step: half-precision copies, gathered weights, buckets.
    """

    strategy: str
    dtype: str
    processes: int
    weights: int
    gradients: int
    optimizer: int
    working: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.working

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "total": self.total}


def training(model: Inventory, dtype: str, strategy: str = "ddp", processes: int = 1) -> Training:
    """Return what training a model with Adam needs on the rank that needs the most.

    Args:
        model: the model; all of its parameters are trained.
        dtype: a key of `COMPUTE_BYTES`.
        strategy: one of `STRATEGIES`. `ddp` on one process is plain training.
        processes: how many ranks there are, at least 1.

    Example:
        >>> from accelerate.checkpoint.manifest import TensorEntry
        >>> from accelerate.commands.estimation.inventory import of_tensors
        >>> linear = of_tensors({"weight": (TensorEntry((8, 8), "F32"), 256)}, "an example")
        >>> training(linear, "float32").total == 16 * 64
        True
        >>> training(linear, "float32", "fsdp", processes=4).optimizer == 8 * 64 // 4
        True
    """
    compute = COMPUTE_BYTES[dtype]
    trained = sum(item.elements for item in model.parameters)
    rest = model.size() - 4 * trained
    if strategy == "ddp":
        copies = compute * trained if compute < 4 else 0
        buckets = 4 * trained if processes > 1 else 0
        sizes = (4 * trained + rest, 4 * trained, 8 * trained, copies + buckets)
    elif strategy in ("fsdp", "shard_grad_op"):
        mine = sum(_rows(item, processes) for item in model.parameters)
        sizes = (4 * mine + rest, 4 * mine, 8 * mine, compute * _gathered(model, strategy == "fsdp"))
    else:
        sizes = _zero(model, compute, int(strategy.removeprefix("zero")), processes, trained, rest)
    return Training(strategy, dtype, processes, *sizes)


def _rows(item: Item, processes: int) -> int:
    """Numbers of a tensor on the first rank: FSDP cuts along the first dimension."""
    if not item.shape:
        return 1
    return math.ceil(item.shape[0] / processes) * math.prod(item.shape[1:])


def _gathered(model: Inventory, again: bool) -> int:
    """Numbers that are whole at once: weights of blocks, and the gradients of the block that was computed last."""
    units = model.units()
    root = units.pop("")
    blocks = sorted(units.values(), reverse=True)
    gradients = max([root, *blocks])
    # The next block is fetched while one is computed; what is outside of blocks stays, for it is used first and last.
    return root + sum(blocks[:2] if again else blocks) + gradients


def _zero(
    model: Inventory, compute: int, stage: int, processes: int, trained: int, rest: int
) -> tuple[int, int, int, int]:
    # DeepSpeed lays parameters end to end, and fills up to a multiple of two numbers a rank.
    part = 2 * math.ceil(trained / (2 * processes))
    if stage == 3:
        working = 2 * compute * (model.largest // 4) if processes > 1 else 0
    else:
        working = compute * min(trained, _ZERO_BUCKET) if processes > 1 else 0
    weights = compute * (part if stage == 3 else trained)
    gradients = compute * (part if stage >= 2 else trained)
    return weights + rest, gradients, 12 * part, working


def inference(model: Inventory, dtype: str) -> int:
    """Return what running a model needs.

    Args:
        model: the model.
        dtype: "float32", "float16", "bfloat16", "int8" or "int4". With the last two, the weights of linear layers are packed with
            their scales, and everything else has 16 bits, as quantising libraries do it.
    """
    if dtype in COMPUTE_BYTES:
        weights = model.size(8 * COMPUTE_BYTES[dtype])
    else:
        weights = sum(_quantised(item, dtype) for item in model.items)
    return math.ceil(INFERENCE_FACTOR * weights)


def _quantised(item: Item, dtype: str) -> int:
    if not item.quantises:
        return item.bytes_at(16)
    if dtype == "int8":
        return item.bytes_at(8) + _SCALE_BYTES * item.shape[0]
    return item.bytes_at(4) + _SCALE_BYTES * math.ceil(item.elements / _BLOCK_4BIT)


def table_of_training(
    model: Inventory, dtypes: Sequence[str], strategies: Sequence[str], processes: int
) -> list[Training]:
    """Return what training needs, for each strategy and each element type that a model can be trained in.

    Args:
        model: the model.
        dtypes: element types; those that nothing can be trained in are left out.
        strategies: as of `STRATEGIES`.
        processes: how many ranks there are.
    """
    usable = [dtype for dtype in dtypes if dtype in COMPUTE_BYTES]
    return [training(model, dtype, strategy, processes) for strategy in strategies for dtype in usable]
