"""What a model consists of, as far as memory goes: its tensors, its layers, and what is sharded together."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from accelerate.checkpoint.manifest import TensorEntry

_BYTES_FP32 = 4
# Weights of blocks have the block's number in their names.
_NUMBERED = re.compile(r"((?:.*?\.)?\d+)\.")
# Names of element types, in files that nobody vouches for.
_KIND = re.compile(r"\w{1,20}")
# What quantising libraries leave as it is: tables that are looked up, and the output.
_NOT_QUANTISED = re.compile(r"embed|wte|wpe|^shared$|lm_head|classifier|norm|position")


@dataclass(frozen=True)
class Item:
    """A tensor of a model.

    Attributes:
        name: its full name.
        shape: its shape.
        stored: its bytes, as it is.
        floating: whether it can be cast to another floating-point type.
        parameter: whether training changes it.
        quantises: whether a quantising library packs it, as it does with the weights of linear layers.
        unit: the block it belongs to, which FSDP gathers at once; empty for what lies outside of all blocks.
    """

    name: str
    shape: tuple[int, ...]
    stored: int
    floating: bool
    parameter: bool
    quantises: bool
    unit: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def bytes_at(self, bits: float) -> int:
        """Return its bytes with so many bits to a number; what is not floating stays as it is.

        Args:
            bits: of a number.
        """
        return math.ceil(self.elements * bits / 8) if self.floating else self.stored


@dataclass(frozen=True)
class Inventory:
    """A model, as far as memory goes.

    Attributes:
        source: what it was found out from, for people.
        items: its tensors; those that share memory once.
        largest: bytes of the largest layer in fp32.
        stored: the element types in its files, such as "BF16"; empty where there are no files of weights.
        largest_stored: bytes of the largest layer, as it lies in the files.
    """

    source: str
    items: tuple[Item, ...]
    largest: int
    stored: str = ""
    largest_stored: int = 0

    def size(self, bits: float = 32) -> int:
        """Return the bytes of all tensors.

        Args:
            bits: of a floating-point number.
        """
        return sum(item.bytes_at(bits) for item in self.items)

    @property
    def size_stored(self) -> int:
        """The bytes of all tensors as they are."""
        return sum(item.stored for item in self.items)

    @property
    def parameters(self) -> tuple[Item, ...]:
        """What training changes."""
        return tuple(item for item in self.items if item.parameter)

    @property
    def packed(self) -> bool:
        """Whether most of it is stored as integers, as quantised weights are: then nobody can tell its other sizes."""
        return 2 * sum(item.stored for item in self.items if not item.floating) > self.size_stored

    def units(self) -> dict[str, int]:
        """Return how many trained numbers each block has; those outside of all blocks are under an empty name."""
        count: Counter[str] = Counter({"": 0})
        for item in self.parameters:
            count[item.unit] += item.elements
        return dict(count)


def of_model(model: "nn.Module", source: str) -> Inventory:
    """Return what a model consists of.

    Args:
        model: the model; its tensors may be on the meta device.
        source: what it was made from, for people.
    """
    from torch import nn

    from accelerate.offload.sizes import get_max_layer_size
    from accelerate.offload.tensors import named_module_tensors

    parameters = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    linear = {name for name, module in model.named_modules() if _is_linear(module, nn.Linear)}
    blocks = _blocks(model)
    items = []
    sizes: Counter[str] = Counter()
    for name, tensor in named_module_tensors(model, recurse=True):
        module, _, last = name.rpartition(".")
        quantises = module in linear and last == "weight" and not _NOT_QUANTISED.search(module)
        unit = next((block for block in blocks if name.startswith(f"{block}.")), "") if blocks else _unit(name)
        floating = tensor.is_floating_point()
        size = tensor.numel() * (_BYTES_FP32 if floating else tensor.element_size())
        items.append(Item(name, tuple(tensor.shape), size, floating, name in parameters, quantises, unit))
        parts = name.split(".")
        sizes.update({".".join(parts[:depth]): size for depth in range(len(parts) + 1)})
    direct = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    largest, _ = get_max_layer_size(direct, sizes, getattr(model, "_no_split_modules", None))
    return Inventory(source, tuple(items), int(largest))


def _is_linear(module: "nn.Module", linear: type) -> bool:
    return isinstance(module, linear) or type(module).__name__ == "Conv1D"  # what GPT-2 has instead


def _blocks(model: "nn.Module") -> list[str]:
    whole = set(getattr(model, "_no_split_modules", None) or ())
    return [name for name, module in model.named_modules() if name and type(module).__name__ in whole]


def of_tensors(tensors: "Mapping[str, tuple[TensorEntry, int]]", source: str) -> Inventory:
    """Return what a model consists of whose tensors alone are known.

    What training changes cannot be told from their names: all floating-point tensors are taken for parameters. A layer is a
    numbered block, or a module with tensors of its own.

    Args:
        tensors: by name, shape and element type (as safetensors names it), and bytes.
        source: where they are, for people.
    """
    items = []
    for name, (entry, size) in tensors.items():
        module, _, last = name.rpartition(".")
        floating = entry.dtype.startswith(("F", "BF"))
        quantises = floating and len(entry.shape) == 2 and last == "weight" and not _NOT_QUANTISED.search(module)
        items.append(Item(name, tuple(entry.shape), size, floating, floating, quantises, _unit(name)))
    kinds: Counter[str] = Counter()
    for entry, size in tensors.values():
        kinds[entry.dtype if _KIND.fullmatch(entry.dtype) else "unknown"] += size
    stored = ", ".join(sorted(kinds, key=lambda kind: (-kinds[kind], kind)))
    largest = _largest((_layer(item), item.bytes_at(8 * _BYTES_FP32)) for item in items)
    largest_stored = _largest((_layer(item), item.stored) for item in items)
    return Inventory(source, tuple(items), largest, stored, largest_stored)


def _layer(item: Item) -> str:
    return item.unit or item.name.rpartition(".")[0]


def _unit(name: str) -> str:
    found = _NUMBERED.match(name)
    return found[1] if found else ""


def _largest(sizes: Iterable[tuple[str, int]]) -> int:
    count: Counter[str] = Counter()
    for layer, size in sizes:
        count[layer] += size
    return max(count.values(), default=0)
