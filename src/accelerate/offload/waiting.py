"""What waits for a device while a model is placed, with the largest layer in it."""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.offload.sizes import compute_module_sizes, is_whole
from accelerate.offload.tied import find_tied_parameters


@dataclass(eq=False, slots=True)
class Item:
    """A module or tensor that waits for a device.

    Attributes:
        name: Its full name.
        thing: The module or tensor.
        size: Its bytes.
        peak: Bytes of the largest layer in it.
        layer: Name of that layer.
        whole: Whether it goes to one device as it is.
        pieces: What waits in its place, once it was opened.
        entered: How often the reserve had been measured when it began to wait.
    """

    name: str
    thing: nn.Module | torch.Tensor
    size: int | float
    peak: int | float
    layer: str
    whole: bool
    pieces: "list[Item] | None" = None
    entered: int = 0

    @property
    def is_module(self) -> bool:
        """Whether it is a module, not a tensor."""
        return isinstance(self.thing, nn.Module)


class Catalogue:
    """What is known of a model before anything is placed.

    Args:
        model: The model.
        no_split: Names of classes that stay on one device.
        dtypes: Arguments of `compute_module_sizes`.

    Attributes:
        sizes: Bytes by name.
        buffers: Bytes of buffers by name.
        tied: The groups of tied parameters.
    """

    def __init__(
        self, model: nn.Module, no_split: Collection[str] = (), dtypes: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.no_split = no_split
        self.sizes = compute_module_sizes(model, **(dtypes or {}))
        self.buffers = compute_module_sizes(model, **(dtypes or {}), buffers_only=True)
        self.tied = find_tied_parameters(model)
        self._layers: dict[str, tuple[int | float, str]] = {}
        for name, child in model.named_children():
            self._find_largest_layer(name, child)

    def _find_largest_layer(self, name: str, module: nn.Module) -> tuple[int | float, str]:
        if is_whole(module, self.no_split):
            found = (self.sizes.get(name, 0), name)
        else:
            below = [self._find_largest_layer(f"{name}.{last}", child) for last, child in module.named_children()]
            found = max(below, key=lambda layer: layer[0])
        self._layers[name] = found
        return found

    def item(self, name: str, thing: nn.Module | torch.Tensor) -> Item:
        """Return a module or tensor of the model as something that waits."""
        size = self.sizes.get(name, 0)
        peak, layer = self._layers[name] if isinstance(thing, nn.Module) else (size, name)
        return Item(name, thing, size, peak, layer, is_whole(thing, self.no_split))


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


class Reserve:
    """The size of the largest layer that waits, for which devices that execute keep room.

    It is measured now and then, and stays as it is until the last of the items that have it was looked at, even where
    such an item was placed meanwhile together with another one.

    Attributes:
        size: Bytes of the layer.
        layer: Its name.
    """

    def __init__(self) -> None:
        self.size: int | float = 0
        self.layer = ""
        self._buckets: dict[bool, dict[int | float, dict[Item, None]]] = {True: {}, False: {}}
        self._heaps: dict[bool, list[int | float]] = {True: [], False: []}
        self._measured = 0
        self._unseen = 0
        self._modules_only = False

    def enter(self, item: Item) -> None:
        """Take notice that an item begins to wait."""
        bucket = self._buckets[item.is_module].setdefault(item.peak, {})
        if not bucket:
            heapq.heappush(self._heaps[item.is_module], -item.peak)
        bucket[item] = None
        item.entered = self._measured

    def leave(self, item: Item) -> None:
        """Take notice that an item does not wait any more."""
        del self._buckets[item.is_module][item.peak][item]

    def measure(self, modules_only: bool = False) -> None:
        """Look up the largest layer of everything that waits, or of the modules among it."""
        kinds = (True,) if modules_only else (True, False)
        self.size = max((self._largest(kind) for kind in kinds), default=0)
        holders = [bucket for kind in kinds if (bucket := self._buckets[kind].get(self.size))]
        self.layer = next(iter(holders[0])).layer if holders else ""
        self._unseen = sum(map(len, holders))
        self._modules_only = modules_only
        self._measured += 1

    def _largest(self, is_module: bool) -> int | float:
        heap, buckets = self._heaps[is_module], self._buckets[is_module]
        while heap and not buckets[-heap[0]]:
            heapq.heappop(heap)
        return -heap[0] if heap else 0

    def _counts(self, item: Item) -> bool:
        """Whether an item is one of those for which room is kept."""
        measured = item.entered < self._measured and (item.is_module or not self._modules_only)
        return measured and item.peak == self.size

    def look_at(self, item: Item) -> None:
        """A layer needs no room in reserve once it is being placed itself."""
        if self._counts(item):
            self._unseen -= 1
            others = self._buckets[item.is_module][item.peak]
            self.layer = next(iter(others), item).layer
        if self._unseen <= 0:
            self.measure(modules_only=True)

    def replace(self, item: Item, pieces: Sequence[Item]) -> None:
        """Have pieces wait in an item's place, without measuring."""
        counted, entered = self._counts(item), item.entered
        self.leave(item)
        self._unseen -= counted
        for piece in pieces:
            self.enter(piece)
            if counted and piece.is_module and piece.peak == self.size:
                piece.entered = entered
                self._unseen += 1


class Waiting:
    """What has no device yet, in order.

    Args:
        catalogue: The model's.

    Attributes:
        items: What waits, by name.
        reserve: The largest layer in it.
        opened: Of each opened module the names of what is right below it.
        loose: Of each opened module the full names of the buffers that it holds itself.
        aliases: Of each opened module the second names of what it holds twice, with the first ones.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.reserve = Reserve()
        self.items: dict[str, Item] = {}
        self.opened: dict[str, list[str]] = {}
        self.loose: dict[str, list[str]] = {}
        self.aliases: dict[str, dict[str, str]] = {}
        # Read from the end. What was placed or opened meanwhile is noticed when its turn comes.
        self._stack: list[Item] = []
        self.push(self._pieces("", catalogue.model))
        self.reserve.measure()

    def _pieces(self, name: str, module: nn.Module) -> list[Item]:
        """Take a module apart: its own tensors, then its children."""
        first: dict[int, str] = {}
        aliases = self.aliases[name] = {}
        kinds: list[list[tuple[str, Any]]] = []
        for table in (module._parameters, module._modules, module._buffers):
            kinds.append([])
            for last, thing in table.items():
                if thing is None:
                    continue
                if first.setdefault(id(thing), last) == last:
                    kinds[-1].append((last, thing))
                elif not isinstance(thing, nn.Module) or _holds_tensors(thing):
                    aliases[last] = first[id(thing)]
        parameters, children, buffers = kinds
        self.opened[name] = [last for last, _ in (*parameters, *children, *buffers)]
        prefix = f"{name}." if name else ""
        if name:
            # Buffers wait at the root alone, as upstream; those of other modules join the rest of it afterwards.
            self.loose[name] = [prefix + last for last, _ in buffers]
            buffers = []
        return [self.catalogue.item(prefix + last, thing) for last, thing in (*parameters, *children, *buffers)]

    def pop(self) -> Item | None:
        """Take the first item out; None if nothing waits."""
        while self._stack:
            item = self._stack.pop()
            if item.pieces is not None:
                self._stack += reversed(item.pieces)
            elif self.items.get(item.name) is item:
                self.remove(item)
                return item
        return None

    def push(self, items: Sequence[Item]) -> None:
        """Put items before all others."""
        self._stack += reversed(items)
        for item in items:
            self.items[item.name] = item
            self.reserve.enter(item)

    def advance(self, item: Item) -> None:
        """Make one that waits already the first."""
        self._stack.append(item)

    def remove(self, item: Item) -> None:
        """Take an item out, wherever it waits."""
        del self.items[item.name]
        self.reserve.leave(item)

    def split(self, item: Item) -> None:
        """Have the pieces of an item that was taken out wait before all others."""
        self.push(self._pieces(item.name, item.thing))

    def open(self, item: Item) -> None:
        """Have the pieces of an item that waits wait in its place."""
        item.pieces = self._pieces(item.name, item.thing)
        del self.items[item.name]
        self.items.update((piece.name, piece) for piece in item.pieces)
        self.reserve.replace(item, item.pieces)

    def holder(self, name: str) -> str | None:
        """Return the name of what waits and is, or holds, the module or tensor of a name."""
        while name not in self.items:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return name

    def is_whole(self, name: str) -> bool:
        """Say whether what waits under a name goes to one device as it is."""
        return self.items[name].whole

    def in_order(self) -> Iterator[Item]:
        """Yield what waits, first to last."""
        stack = list(self._stack)
        while stack:
            item = stack.pop()
            if item.pieces is not None:
                stack += reversed(item.pieces)
            elif self.items.get(item.name) is item:
                yield item
