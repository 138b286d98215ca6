"""What a model consists of, as far as memory goes, and how many bytes a rank needs for it. No weight is loaded.

The tensors come from the headers of weights on a disk, or from a model on the meta device. `docs/guides/estimate-memory.md` derives
the arithmetic.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.checkpoint.inspect import header_of, tensors_of_shards, weight_map
from accelerate.checkpoint.manifest import INDEX_SUFFIX, METADATA, DamagedCheckpoint, TensorEntry, is_generators_file
from accelerate.launch.errors import LaunchError
from accelerate.utils.constants import FSDP_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

STRATEGIES = ("ddp", "fsdp", "shard_grad_op", "zero1", "zero2", "zero3")
# Those element types that a model can be trained in, with the bytes of a number in the forward and backward pass.
COMPUTE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Beside its weights, inference needs room for activations, the cache of keys and values, and the library's workspace.
INFERENCE_FACTOR = 1.2

CONFIG = "config.json"
_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
# Weights of further models, as our checkpoints number them.
_SECOND_MODEL = re.compile(r"model_\d+\.safetensors.*")
# Formats whose tensors cannot be listed without running what is in them, or that are not known here.
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
# Names of element types have the number of bits behind a letter or two: "BF16", "F8_E4M3"; only "BOOL" has none.
_BITS = re.compile(r"[A-Z]{1,2}(\d{1,3})(?:_\w+)?")
# Weights of blocks have the block's number in their names.
_BLOCK = re.compile(r"((?:.*?\.)?\d+)\.")
# What quantising libraries leave as it is: tables that are looked up, and the output.
_NOT_QUANTISED = re.compile(r"embed|wte|wpe|^shared$|lm_head|classifier|norm|position")
# Numbers that DeepSpeed reduces at a time (reduce_bucket_size), unless its configuration says otherwise.
_ZERO_BUCKET = 500_000_000
# bitsandbytes: a scale of 4 bytes for each row of 8-bit weights, and for each 64 weights of 4 bits.
_SCALE_BYTES = 4
_BLOCK_4BIT = 64


@dataclass(frozen=True)
class Item:
    """A tensor of a model.

    Attributes:
        shape: its shape.
        stored: its bytes, as it is.
        floating: whether it can be cast to another floating-point type.
        parameter: whether training changes it.
        linear: whether a quantising library packs it, as it does with the weights of linear layers.
        block: the block that it belongs to, which FSDP gathers at once; empty for what lies outside of all blocks.
        layer: the layer that it belongs to, which has to be on a device at once.
    """

    shape: tuple[int, ...]
    stored: int
    floating: bool
    parameter: bool
    linear: bool
    block: str
    layer: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def bytes_at(self, bits: int | None) -> int:
        """Its bytes with so many bits to a number, or as stored; what is not floating stays as it is."""
        return self.stored if bits is None or not self.floating else math.ceil(self.elements * bits / 8)

    def quantised(self, dtype: str) -> int:
        """Its bytes in a model that is quantised to "int8" or "int4": linear weights with scales, the rest in 16 bits."""
        if not self.linear:
            return self.bytes_at(16)
        if dtype == "int8":
            return self.bytes_at(8) + _SCALE_BYTES * self.shape[0]
        return self.bytes_at(4) + _SCALE_BYTES * math.ceil(self.elements / _BLOCK_4BIT)


@dataclass(frozen=True)
class Inventory:
    """A model, as far as memory goes.

    Attributes:
        source: where its tensors are listed, for people.
        items: its tensors; those that share memory once.
        stored: the element types in its files, such as "BF16"; empty where there are no files of weights.
    """

    source: str
    items: tuple[Item, ...]
    stored: str = ""

    def size(self, bits: int | None = 32) -> int:
        """The bytes of all tensors with so many bits to a floating-point number; with None, as stored."""
        return sum(item.bytes_at(bits) for item in self.items)

    def largest(self, bits: int | None = 32) -> int:
        """The bytes of the largest layer, as `size` counts them."""
        layers: Counter[str] = Counter()
        for item in self.items:
            layers[item.layer] += item.bytes_at(bits)
        return max(layers.values(), default=0)

    @property
    def parameters(self) -> tuple[Item, ...]:
        """What training changes."""
        return tuple(item for item in self.items if item.parameter)

    @property
    def packed(self) -> bool:
        """Whether most of it is stored as integers, as quantised weights are: then its other sizes are unknown."""
        return 2 * sum(item.stored for item in self.items if not item.floating) > self.size(None)


# -- what a model consists of ------------------------------------------------------------------------------------------


def of_model(model: "nn.Module", source: str) -> Inventory:
    """Return what a model consists of, which may be on the meta device."""
    from torch import nn

    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    whole = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [name for name, module in modules.items() if name and type(module).__name__ in whole]
    items = []
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        owner, _, last = name.rpartition(".")
        # GPT-2 has Conv1D instead of linear layers.
        is_linear = isinstance(modules[owner], nn.Linear) or type(modules[owner]).__name__ == "Conv1D"
        linear = is_linear and last == "weight" and not _NOT_QUANTISED.search(owner)
        floating = tensor.is_floating_point()
        size = tensor.numel() * (4 if floating else tensor.element_size())
        trained = floating and name in parameters
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        unit = block if blocks else _block(name)
        items.append(Item(tuple(tensor.shape), size, floating, trained, linear, unit, block or owner))
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
        LaunchError: there is nothing of that, several models, or something damaged.
    """
    files = _files_of(path)
    if files is None:
        return None
    tensors: dict[str, TensorEntry] = {}
    for file, expected in files.items():
        found = _read(tensors_of_shards if os.path.isdir(file) else header_of, file)
        lost = sorted(set(expected) - found.keys())
        if lost:
            raise LaunchError(f"The index in {path!r} says that {lost[0]!r} is in {file!r}, and it is not.")
        tensors |= found
    if not tensors:
        raise LaunchError(f"{path!r} has no tensors.")
    items = []
    kinds: Counter[str] = Counter()
    for name, entry in tensors.items():
        owner, _, last = name.rpartition(".")
        bits = _BITS.fullmatch(entry.dtype.replace("BOOL", "U8"))
        if bits is None:
            raise LaunchError(f"{path!r} has tensors of {entry.dtype}, whose size is not known here.")
        size = math.prod(entry.shape) * int(bits[1]) // 8
        kinds[entry.dtype] += size
        floating = entry.dtype.startswith(("F", "BF"))
        linear = floating and len(entry.shape) == 2 and last == "weight" and not _NOT_QUANTISED.search(owner)
        block = _block(name)
        items.append(Item(tuple(entry.shape), size, floating, floating, linear, block, block or owner))
    first = next(iter(files))
    kind = "metadata" if os.path.isdir(first) else "header"
    source = f"the {kind} of {first}" if len(files) == 1 else f"the headers of {len(files)} files"
    return Inventory(source, tuple(items), ", ".join(kind for kind, _ in kinds.most_common()))


def _files_of(path: str) -> Mapping[str, Sequence[str]] | None:
    """The files and sharded folders of the model at a path, each with the tensors that an index says are in it."""
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, METADATA)):
            return {path: ()}
        paths = _model_in(path)
        if not paths:
            return None
        return _files_of(paths[0]) if len(paths) == 1 else dict.fromkeys(paths, ())
    if not os.path.isfile(path):
        raise LaunchError(f"{path!r} is neither a regular file nor a folder.")
    if path.endswith(_SUFFIX):
        return {path: ()}
    if not path.endswith(".json"):
        raise LaunchError(
            f"{path!r} is no file whose tensors can be listed without loading it. Name a .safetensors file, its .index.json, a "
            "config.json, or a folder with one of them."
        )
    text = read_file(path)
    if b'"weight_map"' not in text and not path.endswith(INDEX_SUFFIX):
        return None
    files = _read(lambda path: weight_map(text, repr(path)), path)
    there = {name: os.path.join(os.path.dirname(path), name) for name in files}
    missing = [name for name, file in there.items() if not os.path.isfile(file)]
    if missing:
        raise LaunchError(
            f"{path!r} names {missing[0]}, which is not there (missing: {len(missing)} of {len(files)} files). Download all "
            "shards, or name the model's config.json."
        )
    if not all(name.endswith(_SUFFIX) for name in files):
        raise LaunchError(f"{path!r} lists files that are no safetensors. Name the model's config.json instead.")
    return {there[name]: tensors for name, tensors in files.items()}


def _model_in(folder: str) -> list[str]:
    """The file, index, sharded folder or numbered files of the one model in a folder; none where it has a configuration."""
    names = sorted(_read(os.listdir, folder))
    models: dict[str, list[str]] = {}
    for name in names:
        shard = _SHARD.fullmatch(name)
        indexed = shard is not None and f"{shard[1]}{_SUFFIX}{INDEX_SUFFIX}" in names
        if not indexed and _is_model(os.path.join(folder, name)):
            label = name if shard is None else f"{shard[1]}-*-of-{shard[2]}{_SUFFIX}"
            models.setdefault(label, []).append(os.path.join(folder, name))
    # What libraries load from a folder; others may lie beside it, such as the same weights in their author's layout.
    usual = [name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if name in models]
    if usual and not any(_SECOND_MODEL.fullmatch(name) for name in models):
        return models[usual[0]]
    if len(models) == 1:
        (name, paths), *_ = models.items()
        shard = _SHARD.fullmatch(os.path.basename(paths[0]))
        if shard is not None and len(paths) != int(shard[2]):
            raise LaunchError(
                f"{name}: {len(paths)} of {int(shard[2])} files are there. Download the others, or name config.json."
            )
        return paths
    if not models and CONFIG in names:
        return []
    patterns = (CONFIG, METADATA, f"*{_SUFFIX}")
    inside = sorted({path.parent.name for pattern in patterns for path in Path(folder).glob(f"*/{pattern}")})
    if models or inside:
        found = list(models) or inside
        which = "several models" if len(found) > 1 else "no model of its own"
        shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        raise LaunchError(f"{folder!r} has {which}: {shown}. Name one, as in {os.path.join(folder, found[0])}.")
    other = next((name for name in names if name.endswith(_OTHER_FORMATS)), None)
    hint = (
        f" The tensors of {other} cannot be listed without loading it; add the model's config.json." if other else ""
    )
    raise LaunchError(f"{folder!r} has no model: neither a .safetensors file nor a config.json is in it.{hint}")


def _is_model(path: str) -> bool:
    name = os.path.basename(path)
    if name.startswith(FSDP_MODEL_NAME) and os.path.isfile(os.path.join(path, METADATA)):
        return True
    weights = name.endswith((_SUFFIX, f"{_SUFFIX}{INDEX_SUFFIX}")) and not is_generators_file(name)
    return weights and os.path.isfile(path)


def read_file(path: str) -> bytes:
    """Return the content of a file.

    Raises:
        LaunchError: it cannot be read.
    """
    return _read(lambda path: Path(path).read_bytes(), path)


def _read(reader: Callable[[str], T], path: str) -> T:
    """Call a reader; an error names the file that cannot be read, or is damaged."""
    try:
        return reader(path)
    except DamagedCheckpoint as error:
        reason = str(error)
        raise LaunchError(reason if path in reason else f"{path!r} is damaged: {reason}") from error
    except OSError as error:
        raise LaunchError(f"{path!r} cannot be read: {error.strerror or error}") from error


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
    buffers = model.size() - 4 * trained
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
        exchanged = 2 * (model.largest() // 4) if stage == 3 else min(trained, _ZERO_BUCKET)
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


def inference(model: Inventory, dtype: str) -> int:
    """Return the bytes that running a model needs, in a key of `COMPUTE_BYTES`, or quantised to "int8" or "int4"."""
    if dtype in COMPUTE_BYTES:
        weights = model.size(8 * COMPUTE_BYTES[dtype])
    else:
        weights = sum(item.quantised(dtype) for item in model.items)
    return math.ceil(INFERENCE_FACTOR * weights)
