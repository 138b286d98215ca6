"""What a model consists of, as far as memory goes, and how many bytes a rank needs for it. No weight is loaded.

The tensors come from the headers of weights on a disk, or from a model on the meta device. `docs/guides/estimate-memory.md` derives
the arithmetic.
"""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.checkpoint.inspect import header_of, tensors_of_shards, weight_map
from accelerate.checkpoint.manifest import INDEX_SUFFIX, METADATA, DamagedCheckpoint, TensorEntry
from accelerate.launch.errors import LaunchError
from accelerate.utils.constants import FSDP_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

if TYPE_CHECKING:
    from torch import nn

STRATEGIES = ("ddp", "fsdp", "shard_grad_op", "zero1", "zero2", "zero3")
# Those element types that a model can be trained in, with the bytes of a number in the forward and backward pass.
COMPUTE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

CONFIG = "config.json"
_SUFFIX = ".safetensors"
# Weights of blocks have the block's number in their names.
_BLOCK = re.compile(r"((?:.*?\.)?\d+)\.")
# Numbers that DeepSpeed reduces at a time (reduce_bucket_size), unless its configuration says otherwise.
_ZERO_BUCKET = 500_000_000


@dataclass(frozen=True)
class Item:
    """A tensor of a model.

    Attributes:
        shape: its shape.
        size: its bytes with floating-point numbers in fp32; integers stay as they are.
        parameter: whether training changes it.
        block: the block that it belongs to, which FSDP gathers at once; empty for what lies outside of all blocks.
        layer: the layer that it belongs to, which has to be on a device at once.
    """

    shape: tuple[int, ...]
    size: int
    parameter: bool
    block: str
    layer: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Inventory:
    """A model, as far as memory goes.

    Attributes:
        source: where its tensors are listed, for people.
        items: its tensors; those that share memory once.
    """

    source: str
    items: tuple[Item, ...]

    @property
    def size(self) -> int:
        """The bytes of all tensors, in fp32."""
        return sum(item.size for item in self.items)

    @property
    def largest(self) -> int:
        """The bytes of the largest layer, in fp32."""
        layers: Counter[str] = Counter()
        for item in self.items:
            layers[item.layer] += item.size
        return max(layers.values(), default=0)

    @property
    def parameters(self) -> tuple[Item, ...]:
        """What training changes."""
        return tuple(item for item in self.items if item.parameter)


# -- what a model consists of ------------------------------------------------------------------------------------------


def of_model(model: "nn.Module", source: str) -> Inventory:
    """Return what a model consists of, which may be on the meta device."""
    parameters = dict(model.named_parameters())
    whole = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [name for name, module in model.named_modules() if name and type(module).__name__ in whole]
    items = []
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        floating = tensor.is_floating_point()
        size = tensor.numel() * (4 if floating else tensor.element_size())
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        unit = block if blocks else _block(name)
        layer = block or name.rpartition(".")[0]
        items.append(Item(tuple(tensor.shape), size, floating and name in parameters, unit, layer))
    return Inventory(source, tuple(items))


def _block(name: str) -> str:
    found = _BLOCK.match(name)
    return found[1] if found else ""


def of_path(path: str) -> Inventory | None:
    """Return what the weights at a path consist of.

    What training changes does not follow from names: all floating-point tensors are taken for parameters. A layer is a numbered
    block, or a module with tensors of its own.

    Args:
        path: a safetensors file, an index of several, a folder with one or the other or with shards as torch's distributed
            checkpoints have them, or a JSON file.

    Returns:
        The model; None if there are no weights, but a configuration: the JSON file itself, or `config.json` in the folder.

    Raises:
        LaunchError: there is nothing of that, several models, something damaged, or weights that are packed into integers.
        OSError: a file is missing or cannot be read.
    """
    tensors: dict[str, TensorEntry] = {}
    try:
        files = _files_of(path)
        for file in files:
            tensors |= tensors_of_shards(file) if os.path.isdir(file) else header_of(file)
    except DamagedCheckpoint as error:
        raise LaunchError(f"{path!r} is damaged: {error}") from error
    if not files:
        return None
    items = []
    stored: Counter[bool] = Counter()  # bytes of floating-point numbers, and of integers
    for name, entry in tensors.items():
        bits = int(re.search(r"\d+", entry.dtype.replace("BOOL", "U8"))[0])  # "BF16", "F8_E4M3"
        count, floating, block = math.prod(entry.shape), "F" in entry.dtype, _block(name)
        stored[floating] += count * bits // 8
        size = 4 * count if floating else count * bits // 8
        items.append(Item(entry.shape, size, floating, block, block or name.rpartition(".")[0]))
    if stored[False] > stored[True]:
        packed = f"{path!r} has weights that are packed into integers ({stored.total():,} bytes)"
        raise LaunchError(f"{packed}: their size in other types is unknown. --library_name transformers counts them.")
    return Inventory(files[0] if len(files) == 1 else f"{len(files)} files of weights", tuple(items))


def _files_of(path: str) -> list[str]:
    """The files of weights, or the folder of shards, of the model at a path; none for a configuration."""
    if os.path.isdir(path):
        return _files_in(path)
    if path.endswith(_SUFFIX):
        return [path]
    if path.endswith(_SUFFIX + INDEX_SUFFIX):
        with open(path, "rb") as index:
            names = weight_map(index.read(), "it")
        return [os.path.join(os.path.dirname(path), name) for name in sorted(names)]
    if path.endswith(".json"):
        return []
    known = "a .safetensors file, its .index.json, a config.json, or a folder with one of them"
    raise LaunchError(f"The tensors of {path!r} cannot be listed without loading it. Name {known}.")


def _files_in(folder: str) -> list[str]:
    names = sorted(os.listdir(folder))
    if METADATA in names:
        return [folder]
    # What libraries load from a folder; others may lie beside it, such as the same weights in their author's layout.
    usual = [name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, f"{FSDP_MODEL_NAME}_0") if name in names]
    found = usual[:1] or [name for name in names if name.endswith((_SUFFIX, _SUFFIX + INDEX_SUFFIX))]
    if len(found) == 1:
        return _files_of(os.path.join(folder, found[0]))
    if found:
        raise LaunchError(f"{folder!r} has several files of weights: {', '.join(found[:5])}. Name one, or an index.")
    if CONFIG in names:
        return []
    inside = ", ".join(names[:5]) or "nothing"
    raise LaunchError(f"{folder!r} has no model: neither a .safetensors file nor a config.json, but {inside}.")


# -- what a rank needs -------------------------------------------------------------------------------------------------


def training(model: Inventory, dtype: str, strategy: str = "ddp", processes: int = 1) -> dict[str, Any]:
    """Return what training a model with Adam needs on the rank that needs the most, activations left out.

    Args:
        model: the model; all of its parameters are trained.
        dtype: a key of `COMPUTE_BYTES`; "float16" and "bfloat16" stand for mixed precision.
        strategy: one of `STRATEGIES`. `ddp` on one process is plain training.
        processes: how many ranks there are, at least 1.

    Returns:
        The arguments, and bytes: "weights" (with all buffers), "gradients", "optimizer" (Adam's two moments, and the fp32 weights
        that ZeRO keeps beside the others), "working" (what comes and goes within a step: half-precision copies, gathered
        weights, buckets), and their "total".
    """
    compute = COMPUTE_BYTES[dtype]
    trained = sum(item.elements for item in model.parameters)
    buffers = model.size - 4 * trained
    alone = processes == 1
    if strategy == "ddp":
        weights, gradients, optimizer = 4 * trained, 4 * trained, 8 * trained
        copies = compute * trained if compute < 4 else 0
        working = copies + (0 if alone else 4 * trained)
    elif strategy in ("fsdp", "shard_grad_op"):
        # FSDP cuts along the first dimension; the first rank has the most rows.
        shapes = [item.shape or (1,) for item in model.parameters]
        mine = sum(math.ceil(rows / processes) * math.prod(row) for rows, *row in shapes)
        weights, gradients, optimizer = 4 * mine, 4 * mine, 8 * mine
        working = compute * _gathered(model, again=strategy == "fsdp")
    else:
        stage = int(strategy.removeprefix("zero"))
        # DeepSpeed lays parameters end to end, and fills up to a multiple of two numbers a rank.
        part = 2 * math.ceil(trained / (2 * processes))
        weights = compute * (part if stage == 3 else trained)
        gradients = compute * (part if stage >= 2 else trained)
        optimizer = 12 * part
        exchanged = 2 * (model.largest // 4) if stage == 3 else min(trained, _ZERO_BUCKET)
        working = 0 if alone else compute * exchanged
    sizes = {"weights": weights + buffers, "gradients": gradients, "optimizer": optimizer, "working": working}
    arguments = {"strategy": strategy, "dtype": dtype, "processes": processes}
    return {**arguments, **sizes, "total": sum(sizes.values())}


def _gathered(model: Inventory, again: bool) -> int:
    """Numbers that are whole at once under FSDP: weights of blocks, and the gradients of the block that was computed last."""
    counted: Counter[str] = Counter()
    for item in model.parameters:
        counted[item.block] += item.elements
    root = counted.pop("", 0)
    blocks = sorted(counted.values(), reverse=True)
    # The next block is fetched while one is computed; what is outside of blocks stays, for it is used first and last.
    return root + sum(blocks[:2] if again else blocks) + max([root, *blocks])
