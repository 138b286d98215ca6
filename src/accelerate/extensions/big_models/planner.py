"""Filling devices with the modules of a model, one device after the other: what `infer_auto_device_map` runs.

The work grows linearly with the number of modules (and with the square of the number of names of one weight, which are
few): names lead to items through dictionaries, the sizes of the layers that wait are counted, and nothing is searched
for from the beginning.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.extensions.big_models.tensors import (
    compute_module_sizes,
    device_of,
    entry_of,
    find_tied_parameters,
    is_whole,
    name_and_parents,
    named_module_tensors,
)

Key = int | str
UNBOUNDED = "disk"


def make_plan(model: nn.Module, budgets: Mapping[Key, int | float], **options: Any) -> "Planner":
    """Return a planner that has placed a model; `options` are further fields of `Planner`.

    What is tied to a module that comes along because of a tie is brought along as well only where a tied parameter
    would have two devices otherwise: all of them together may be too much for a device.
    """
    for follow_ties in (False, True):
        plan = Planner(model, budgets, **options, follow_ties=follow_ties)
        plan.run()
        if all(len({device_of(name, plan.placed) for name in group}) == 1 for group in plan.ties.groups):
            break
    return plan


class Ties:
    """The groups of tied parameters, by every module that one of them is in."""

    def __init__(self, groups: Sequence[Sequence[str]], followed: bool = False) -> None:
        self.groups, self.followed = groups, followed
        self._of: dict[str, dict[int, None]] = {}
        for index, group in enumerate(groups):
            for name in group:
                for part in name_and_parents(name):
                    self._of.setdefault(part, {})[index] = None

    def partners(self, name: str, holder: Callable[[str], str | None]) -> list[str]:
        """Return the waiting items that must go where an item goes; `holder` names that which has a tensor."""
        found: dict[str, None] = {}
        groups: set[int] = set()
        items = [name]
        for item in items:  # grows while ties are followed
            for index in self._of.get(item, {}):
                if index in groups:
                    continue
                groups.add(index)
                for partner in map(holder, self.groups[index]):
                    if partner is not None and partner not in found:
                        found[partner] = None
                        items += [partner] if self.followed else []
        return list(found)


@dataclass(eq=False)
class _Item:
    """A module or tensor that waits for a device.

    `layers` are the sizes of what is in it and has to be on a device at once, `peak` the largest of them; `place` is its
    number in the module that holds it, behind that one's; `seen` is the measurement of the reserve in which it was looked at last.
    """

    name: str
    thing: nn.Module | torch.Tensor
    size: int | float
    layers: list[int | float]
    whole: bool
    place: tuple[int, ...]
    seen: int = -1

    def __post_init__(self) -> None:
        self.is_module = isinstance(self.thing, nn.Module)
        self.peak = max(self.layers) if self.layers else self.size


class _Reserve:
    """The size of the largest waiting layer, for which devices that execute keep room.

    It is measured now and then, and stays until the last item that has it was looked at, even where that one was
    placed meanwhile.
    """

    def __init__(self, items: Sequence[_Item]) -> None:
        self._waiting: Counter[int | float] = Counter()
        self._heap: list[int | float] = []  # the sizes that waited, negative, so that the largest is the first
        self._measured = -1
        for item in items:
            self.enter(item)
        self.measure()
        # At the beginning the tensors of the root count as layers, too.
        tensors = [item.size for item in items if not item.is_module]
        if tensors and max(tensors) > self.size:
            self.size, self._unseen = max(tensors), 0
        self._unseen += tensors.count(self.size)

    def enter(self, item: _Item) -> None:
        """Take notice that an item waits."""
        for size in item.layers:
            if not self._waiting[size]:
                heapq.heappush(self._heap, -size)
            self._waiting[size] += 1

    def leave(self, item: _Item) -> None:
        """Take notice that an item does not wait any more."""
        self._waiting.subtract(item.layers)

    def measure(self) -> None:
        """Look up the largest layer of the modules that wait."""
        while self._heap and not self._waiting[-self._heap[0]]:
            heapq.heappop(self._heap)
        self.size = -self._heap[0] if self._heap else 0
        self._unseen = self._waiting[self.size]
        self._measured += 1

    def look_at(self, item: _Item) -> None:
        """A layer needs no room in reserve once it is being placed itself."""
        if item.peak == self.size and item.seen < self._measured and (item.is_module or not self._measured):
            self._unseen -= item.layers.count(item.peak) or 1
        if self._unseen <= 0:
            self.measure()
        item.seen = self._measured


class _Waiting:
    """What has no device yet, by name, and in the order in which it is registered.

    What was placed or opened meanwhile stays in the heap, and is noticed when its turn comes. `loose` has the full names
    of the buffers that opened modules hold themselves.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int | float], no_split: Collection[str]) -> None:
        self._sizes, self._no_split = sizes, no_split
        self._layers: dict[str, list[int | float]] = {}
        for name, child in model.named_children():
            self._find_layers(name, child)
        self.loose: list[str] = []
        first = self.pieces("", model)
        self.items = {item.name: item for item in first}
        self.reserve = _Reserve(first)
        self._heap = [(item.place, item.name) for item in first]

    def _find_layers(self, name: str, module: nn.Module) -> list[int | float]:
        found = [self._sizes.get(name, 0)] if is_whole(module, self._no_split) else []
        for last, child in module.named_children() if not found else ():
            found += self._find_layers(f"{name}.{last}", child)
        self._layers[name] = found
        return found

    def pieces(self, name: str, module: nn.Module, place: tuple[int, ...] = ()) -> list[_Item]:
        """Divide a module that has some place: its own tensors, then its children."""
        found, buffers = parts(name, module), list(module.named_buffers(name, recurse=False))
        if name:
            # Buffers wait at the root alone, as upstream; those of other modules join the rest of it afterwards.
            self.loose += [full for full, _ in buffers]
        else:
            found += buffers
        sizes, layers, no_split = self._sizes, self._layers, self._no_split
        return [
            _Item(full, part, sizes.get(full, 0), layers.get(full, []), is_whole(part, no_split), (*place, number))
            for number, (full, part) in enumerate(found)
        ]

    def pop(self) -> _Item | None:
        """Take the first item out; None if nothing waits."""
        while self._heap:
            item = self.items.get(heapq.heappop(self._heap)[1])
            if item is not None:
                self.remove(item)
                return item
        return None

    def push(self, items: Sequence[_Item]) -> None:
        """Have items wait, each in its place."""
        for item in items:
            heapq.heappush(self._heap, (item.place, item.name))
            self.items[item.name] = item
            self.reserve.enter(item)

    def remove(self, item: _Item) -> None:
        """Take an item out, wherever it waits."""
        del self.items[item.name]
        self.reserve.leave(item)

    def open(self, item: _Item) -> None:
        """Have the pieces of an item that waits wait in its place."""
        pieces = self.pieces(item.name, item.thing, item.place)
        for piece in pieces:
            piece.seen = item.seen if piece.is_module else 0  # tensors are no layers of the first measurement
        self.remove(item)
        self.push(pieces)

    def bring_forward(self, item: _Item) -> None:
        """Have an item that waits be the first."""
        item.place = (-1,)
        heapq.heappush(self._heap, (item.place, item.name))

    def holder(self, name: str) -> str | None:
        """Return the name of what waits and is, or holds, the module or tensor of a name."""
        return entry_of(name, self.items)


@dataclass(eq=False)
class Planner:
    """Fills devices one after the other with the modules of a model, in the order in which they are registered.

    The first accelerator, where offloaded layers are brought to, and the host memory, where they wait for it, keep
    room for the largest layer. What does not fit is split; what cannot be split is the first on the next device.

    Args:
        fallback: Whether an otherwise empty device gets a deeper module that fits.
        follow_ties: Whether what is tied to a module that comes along because of a tie comes along as well.

    Attributes:
        placed: Name to device, for every module or tensor that was not split further.
        used: Bytes placed on each device.
        kept: Bytes that devices keep free for the largest layer that was still waiting when they were left.
        refused: What each device refused last: its name, its size with all tied to it, and the reserve there.
        buffers: Bytes of the buffers of offloaded layers that stay on the device that runs those.
    """

    model: nn.Module
    budgets: Mapping[Key, int | float | None]
    no_split: Collection[str] = ()
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    offload_buffers: bool = False
    fallback: bool = False
    verbose: bool = False
    follow_ties: bool = False

    def __post_init__(self) -> None:
        self.budgets = {**self.budgets, UNBOUNDED: None}
        self.devices = list(self.budgets)
        accelerators = [device for device in self.devices if device not in ("cpu", UNBOUNDED)]
        self.executing = ["mps"] if "mps" in self.devices else [*accelerators[:1], "cpu"]
        self.sizes = compute_module_sizes(self.model, **self.dtypes)
        self.ties = Ties(find_tied_parameters(self.model), self.follow_ties)
        self.waiting = _Waiting(self.model, self.sizes, self.no_split)
        self.reserve = self.waiting.reserve
        self.placed: dict[str, Key] = {}
        self.refused: dict[Key, tuple[str, int | float, int | float]] = {}
        self.used: Counter[Key] = Counter()
        self.kept: dict[Key, int | float] = {}
        self.device = self.devices[0]  # the one that is being filled

    def run(self) -> None:
        """Place everything."""
        while (item := self.waiting.pop()) is not None:
            self._treat(item)
        self._join_buffers()
        offloaded = [name for name, device in self.placed.items() if device in ("cpu", UNBOUNDED)]
        sizes = {} if self.offload_buffers else compute_module_sizes(self.model, **self.dtypes, buffers_only=True)
        self.buffers = sum(sizes.get(name, 0) for name in offloaded)
        self._add_second_names()

    @property
    def left(self) -> int | float:
        """Bytes that the device can still take."""
        budget = self.budgets[self.device]
        return float("inf") if budget is None else budget - self.reserve_here - self.used[self.device]

    @property
    def reserve_here(self) -> int | float:
        """Bytes that the device keeps free for the largest layer."""
        return self.reserve.size if self.device in self.executing else 0

    def _treat(self, item: _Item) -> None:
        self.reserve.look_at(item)
        while True:
            partners = [self.waiting.items[name] for name in self.ties.partners(item.name, self.waiting.holder)]
            size = item.size + sum(partner.size for partner in partners)
            if size <= self.left:
                self._place([item, *partners])
                return
            splittable = next((partner for partner in partners if not partner.whole), None)
            if splittable is not None and item.size <= self.left:
                self._split_partner(item, splittable)
            # What fills a device exactly is too large where it is tied, as upstream.
            elif item.size >= self.left and not item.whole:
                self._refuse(item, item.size, "it was split")
                self.waiting.push(self.waiting.pieces(item.name, item.thing, item.place))
                self.reserve.measure()
                return
            else:
                tied = f"tied to {', '.join(partner.name for partner in partners)}, and " if partners else ""
                self._refuse(item, size, f"{tied}it cannot be split")
                self._next_device(item, size)
                return

    def _split_partner(self, item: _Item, partner: _Item) -> None:
        """Split a tied module, so that only the part with the tied weights has to come along."""
        self.waiting.open(partner)
        # The reserve is measured with the item among what waits, although it is about to be looked at again.
        self.reserve.enter(item)
        self.reserve.measure()
        self.reserve.leave(item)
        self.reserve.look_at(item)

    def _place(self, items: Sequence[_Item]) -> None:
        if self.verbose:
            names, size = ", ".join(item.name for item in items), sum(item.size for item in items)
            print(f"Putting {names} ({size} bytes) on {self.device}.")
        for partner in items[1:]:
            self.waiting.remove(partner)
        for item in items:
            self.placed[item.name] = self.device
            self.used[self.device] += item.size

    def _join_buffers(self) -> None:
        """Put the buffers of modules that were opened onto the first device with parts of the module, or a later one with room."""
        first: dict[str, int] = {}
        for name, device in self.placed.items():  # in the order in which devices were filled
            for module in name_and_parents(name.rpartition(".")[0]):
                first.setdefault(module, self.devices.index(device))
        for name in self.waiting.loose:
            size = self.sizes.get(name, 0)
            for device in self.devices[first.get(name.rpartition(".")[0], -1) :]:
                budget = self.budgets[device]
                if budget is None or self.used[device] + size <= budget:
                    break
            self.placed[name] = device
            self.used[device] += size

    def _next_device(self, item: _Item, size: int | float) -> None:
        self.waiting.push([item])
        empty = self.device in self.executing and not self.used[self.device]
        if self.fallback and empty and self._go_deeper(item, size):
            return
        self.kept[self.device] = self.reserve_here
        self.device = self.devices[self.devices.index(self.device) + 1]

    def _refuse(self, item: _Item, size: int | float, cause: str) -> None:
        self.refused[self.device] = (item.name, size, self.reserve_here)
        if self.verbose:
            space = f"space available {max(0, self.left)}, needed {size}"
            print(f"Not enough space on {self.device} for {item.name} ({space}): {cause}.")

    def _go_deeper(self, refused: _Item, needed: int | float) -> bool:
        """Look for a module further on, however deep, that fits onto an empty device, and have it treated next."""
        # What did not fit waits again, so there has to be room for it too, and for what is tied to it.
        limit = self.budgets[self.device] - max(self.reserve.size, needed)
        in_order = sorted(self.waiting.items.values(), key=lambda item: item.place)
        tops = ((item.name, item.thing) for item in in_order if item is not refused)
        path = next(fitting(tops, self.sizes, limit, self.no_split, self.ties, self.waiting.holder), None)
        if path is None:
            return False
        for name in path[:-1]:
            self.waiting.open(self.waiting.items[name])
        self.waiting.bring_forward(self.waiting.items[path[-1]])
        return True

    def _add_second_names(self) -> None:
        """Add the second names of what one module holds twice, which its list of children and tensors omits."""
        first: dict[int, str] = {}
        kinds = (self.model.named_modules, self.model.named_parameters, self.model.named_buffers)
        for name, thing in itertools.chain(*(named(remove_duplicate=False) for named in kinds)):
            known = first.setdefault(id(thing), name)
            is_module = isinstance(thing, nn.Module)
            entry = known if is_module else entry_of(known, self.placed)
            if entry not in self.placed or entry_of(name, self.placed) is not None:
                continue
            if not is_module or next(named_module_tensors(thing, recurse=True), None) is not None:
                self.placed[name] = self.placed[entry]


def fitting(
    items: Iterable[tuple[str, nn.Module | torch.Tensor]],
    sizes: Mapping[str, int | float],
    limit: int | float,
    no_split: Collection[str],
    ties: Ties,
    holder: Callable[[str], str | None],
) -> Iterator[list[str]]:
    """Yield the modules, however deep, that fit into a limit together with all that they are tied to.

    Each comes as the names of the modules around it, outermost first, and its own. `holder` names the waiting module a
    tensor is in.
    """

    def holder_beside(path: list[str], tensor: str) -> str | None:
        # As if the modules around the candidate were open.
        around = [outer for outer in path if f"{tensor}.".startswith(f"{outer}.")]
        if not around:
            return holder(tensor)
        start = len(around[-1]) + 1
        return None if around[-1] == path[-1] else around[-1] + "." + tensor[start:].partition(".")[0]

    stack: list[tuple[list[str], nn.Module | torch.Tensor]] = []
    for top, module in items:
        stack.append(([top], module))
        while stack:
            path, thing = stack.pop()
            size = sizes.get(path[-1], 0)
            if size <= limit:
                partners = ties.partners(path[-1], lambda tensor, path=path: holder_beside(path, tensor))
                size += sum(sizes.get(partner, 0) for partner in partners)
            if size <= limit:
                yield path
            elif not is_whole(thing, no_split):
                stack += [([*path, name], child) for name, child in reversed(parts(path[-1], thing))]


def parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return the parameters that a module holds itself and its children, with full names."""
    prefix = f"{name}." if name else ""
    found = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(prefix + last, part) for last, part in found]
