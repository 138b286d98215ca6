"""The parts of a model that take memory: its tensors with their shapes, blocks and layers, and the segments of a step. Nothing is loaded."""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accelerate.base.constants import FSDP_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from accelerate.checkpoint.manifest import INDEX_SUFFIX, METADATA, DamagedCheckpoint, TensorEntry, weight_map
from accelerate.extensions.export.headers import header_of, tensors_of_shards
from accelerate.runtime.durable import require_file

if TYPE_CHECKING:
    from torch import nn

CONFIG = "config.json"
_SUFFIX = ".safetensors"
# Weights of blocks have the block's number in their names.
_BLOCK = re.compile(r"((?:.*?\.)?\d+)\.")


@dataclass(frozen=True)
class Item:
    """A tensor of a model.

    Attributes:
        size: its bytes with floating-point numbers in fp32; integers stay as they are.
        parameter: whether it is a parameter, so that strategies cast and shard it.
        block: the block that FSDP gathers at once; empty outside of all blocks.
        layer: its layer, which must be on a device at once.
        split: the number of ranks with a part of this shape each; FSDP shards the parts over the other ranks.
        frozen: whether training does not change it.
    """

    shape: tuple[int, ...]
    size: int
    parameter: bool
    block: str
    layer: str
    split: int = 1
    frozen: bool = False

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Inventory:
    """The memory of a model: its tensors (shared memory counts once), and their source."""

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
        """The parameters, frozen ones included."""
        return tuple(item for item in self.items if item.parameter)

    @property
    def trained(self) -> "Inventory":
        """The model without frozen parameters."""
        return replace(self, items=tuple(item for item in self.items if not item.frozen))


@dataclass(frozen=True)
class Segment:
    """A part of a step: from where a unit begins in forward or backward to where the next one does.

    Attributes:
        unit: its name; empty between units.
        peak: most bytes of activations, temporaries and of gradients of parameters that this segment created.
        end: bytes of activations at its end.
        created: bytes of gradients of parameters that it created.
        flops: of its operations.
        split: collectives among the ranks that share a layer, as (name, bytes).
    """

    backward: bool
    unit: str
    peak: int = 0
    end: int = 0
    created: int = 0
    flops: int = 0
    split: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """The segment in words."""
        return f"{'backward' if self.backward else 'forward'} of {self.unit or 'what is outside of blocks'}"


@dataclass(frozen=True)
class Profile:
    """The result of `activations.measure`: the model on one rank of tensor parallelism, and the segments of a step in order.

    Attributes:
        keys: numbers of the keys and values of all layers, for the tokens of the rank; 0 if not known.
    """

    inventory: Inventory
    segments: tuple[Segment, ...]
    keys: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward and a backward pass."""
        return sum(segment.flops for segment in self.segments)

    def extended(self, single: "Profile", factor: int) -> "Profile":
        """Return the profile of a larger batch; this one is of two samples, `single` of one: sizes are linear in the batch."""
        pairs = zip(single.segments, self.segments, strict=True)
        segments = tuple(_line(first, second, factor - 1) for first, second in pairs)
        return replace(self, segments=segments, keys=single.keys * factor)


def _line(first: Segment, second: Segment, steps: int) -> Segment:
    """Continue the straight line from one segment to another by so many steps from the first on."""
    names = ("peak", "end", "flops")
    sizes = {name: getattr(first, name) + steps * (getattr(second, name) - getattr(first, name)) for name in names}
    pairs = zip(first.split, second.split, strict=True)
    return replace(second, **sizes, split=tuple((name, old + steps * (new - old)) for (name, old), (_, new) in pairs))


def block_names(model: "nn.Module") -> list[str]:
    """Return the names of the modules that FSDP shards on their own: the classes that a model does not let be split."""
    from accelerate.strategies.shard import units

    whole = set(getattr(model, "_no_split_modules", None) or ())
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in units(model, lambda module: type(module).__name__ in whole)]


def inventory_of_model(model: "nn.Module", source: str) -> Inventory:
    """Return the inventory of a model, which may be on the meta device."""
    from accelerate.runtime import torch_private

    parameters = dict(model.named_parameters())
    blocks = block_names(model)
    items = []
    for name, whole in {**parameters, **dict(model.named_buffers())}.items():
        tensor = torch_private.local_part(whole)
        floating = tensor.is_floating_point()
        size = tensor.numel() * (4 if floating else tensor.element_size())
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        unit = block if blocks else _block(name)
        layer = block or name.rpartition(".")[0]
        split = whole.numel() // max(1, tensor.numel())
        parameter, frozen = floating and name in parameters, name in parameters and not whole.requires_grad
        items.append(Item(tuple(tensor.shape), size, parameter, unit, layer, split, frozen))
    return Inventory(source, tuple(items))


def _block(name: str) -> str:
    match = _BLOCK.match(name)
    return match[1] if match else ""


def inventory_of_path(path: str) -> Inventory | None:
    """Return the inventory of the weights at a path; None for a configuration without weights.

    A path is a safetensors file, an index of several, a folder with one of them or with shards of torch's distributed
    checkpoints, or a JSON file. All floating-point tensors count as parameters. A ValueError names damaged, ambiguous or
    missing files, and weights packed into integers.
    """
    tensors: dict[str, TensorEntry] = {}
    try:
        files = _files_of(path)
        for file in files:
            tensors |= tensors_of_shards(file) if os.path.isdir(file) else header_of(file)
    except DamagedCheckpoint as error:
        raise ValueError(f"{path!r} is damaged: {error}") from error
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
        raise ValueError(f"{packed}: their size in other types is unknown. --library_name transformers counts them.")
    return Inventory(files[0] if len(files) == 1 else f"{len(files)} files of weights", tuple(items))


def _files_of(path: str) -> list[str]:
    """The files of weights, or the folder of shards, of the model at a path; none for a configuration."""
    if os.path.isdir(path):
        return _files_in(path)
    if path.endswith(_SUFFIX):
        return [path]
    if path.endswith(_SUFFIX + INDEX_SUFFIX):
        require_file(path)
        with open(path, "rb") as index:
            names = weight_map(index.read(), "it")
        return [os.path.join(os.path.dirname(path), name) for name in sorted(names)]
    if path.endswith(".json"):
        return []
    readable = "a .safetensors file, its .index.json, a config.json, or a folder with one of them"
    raise ValueError(f"The tensors of {path!r} cannot be listed without loading it. Name {readable}.")


def _files_in(folder: str) -> list[str]:
    names = sorted(os.listdir(folder))
    if METADATA in names:
        return [folder]
    # Names that libraries load from a folder. Others may exist next to them, such as the same weights in their author's layout.
    usual = [name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, f"{FSDP_MODEL_NAME}_0") if name in names]
    files = usual[:1] or [name for name in names if name.endswith((_SUFFIX, _SUFFIX + INDEX_SUFFIX))]
    if len(files) == 1:
        return _files_of(os.path.join(folder, files[0]))
    if files:
        raise ValueError(f"{folder!r} has several files of weights: {', '.join(files[:5])}. Name one, or an index.")
    if CONFIG in names:
        return []
    inside = ", ".join(names[:5]) or "nothing"
    raise ValueError(f"{folder!r} has no model: neither a .safetensors file nor a config.json, but {inside}.")
