"""Filling devices with the modules of a model, one device after the other: what `infer_auto_device_map` runs.

The work grows linearly with the number of modules: names lead to items through dictionaries, the sizes of the layers that wait are
counted, and nothing is searched for from the beginning.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.offload.sizes import compute_module_sizes, is_whole
from accelerate.offload.tensors import Company, Ties, find_tied_parameters, name_and_parents

Key = int | str
UNBOUNDED = "disk"


@dataclass(frozen=True)
class DeviceUse:
    """What a plan does with one device.

    Attributes:
        device: The device, as in a device map.
        budget: Bytes that it may take; None: any number.
        reserve: Bytes kept free for the largest layer that was still waiting when the device was left.
        used: Bytes placed there.
        buffers: Bytes of buffers among them that stay on the executing device, where this one is offloaded.
        modules: How many modules and single tensors are placed there.
    """

    device: Key
    budget: int | float | None
    reserve: int | float
    used: int | float
    buffers: int | float
    modules: int


@dataclass(frozen=True)
class Refusal:
    """A module or tensor, `size` bytes with what is tied to it, that did not fit onto a device with `left` bytes, and why.

    `reserve` is what the device keeps free for the largest layer; `emptied` says that the device was left without anything on it.
    """

    name: str
    size: int | float
    device: Key
    left: int | float
    reserve: int | float
    cause: str
    emptied: bool


@dataclass(frozen=True)
class Plan:
    """Where a model goes, and why.

    Attributes:
        device_map: Name to device, for every module or tensor that was not split further.
        devices: What happened to each device, in the order in which they were filled.
        refusals: What did not fit, in the order in which it was tried.
        tied: The groups of tied parameters of the model.
    """

    device_map: dict[str, Key]
    devices: tuple[DeviceUse, ...]
    refusals: tuple[Refusal, ...]
    tied: list[list[str]]


def make_plan(
    model: nn.Module,
    budgets: Mapping[Key, int | float],
    no_split: Collection[str] = (),
    dtypes: Mapping[str, Any] | None = None,
    **options: bool,
) -> Plan:
    """Return a plan for a model.

    What is tied to a module that comes along because of a tie is brought along as well only where a tied parameter would
    have two devices otherwise: all of them together may be too much for a device.

    Args:
        model: The model.
        budgets: Bytes per device, in the order in which devices are filled.
        no_split: Names of classes that stay on one device.
        dtypes: Arguments of `compute_module_sizes`.
        **options: Other arguments of `_Planner`.
    """
    plan = _Planner(model, budgets, no_split, dtypes or {}, **options).plan()
    if all(len({_device_of(name, plan.device_map) for name in group}) == 1 for group in plan.tied):
        return plan
    return _Planner(model, budgets, no_split, dtypes or {}, **options, follow_ties=True).plan()


def _device_of(name: str, device_map: Mapping[str, Key]) -> Key | None:
    return next((device_map[part] for part in name_and_parents(name) if part in device_map), None)


@dataclass(eq=False)
class _Item:
    """A module or tensor that waits for a device.

    `layers` are the sizes of what is in it and has to be on a device at once, `peak` the largest of them; `pieces` wait in its
    place once it was opened, and `seen` is the measurement of the reserve in which it was looked at last.
    """

    name: str
    thing: nn.Module | torch.Tensor
    size: int | float
    layers: list[int | float]
    whole: bool
    seen: int = -1
    pieces: "list[_Item] | None" = None

    def __post_init__(self) -> None:
        self.is_module = isinstance(self.thing, nn.Module)
        self.peak = max(self.layers) if self.layers else self.size


class _Reserve:
    """The size of the largest layer that waits, for which devices that execute keep room.

    It is measured now and then, and stays as it is until the last of the items that have it was looked at, even where
    such an item was placed meanwhile together with another one.
    """

    def __init__(self, layers: Iterable[int | float], items: Sequence[_Item]) -> None:
        self._sizes = sorted(set(layers), reverse=True)
        self._rank = {size: rank for rank, size in enumerate(self._sizes)}
        self._waiting: Counter[int | float] = Counter()
        self._top = 0
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
        if item.layers:
            self._waiting.update(item.layers)
            self._top = min(self._top, self._rank[item.peak])

    def leave(self, item: _Item) -> None:
        """Take notice that an item does not wait any more."""
        self._waiting.subtract(item.layers)

    def measure(self) -> None:
        """Look up the largest layer of the modules that wait."""
        while self._top < len(self._sizes) and not self._waiting[self._sizes[self._top]]:
            self._top += 1
        self.size = self._sizes[self._top] if self._top < len(self._sizes) else 0
        self._unseen = self._waiting[self.size]
        self._measured += 1

    def look_at(self, item: _Item) -> None:
        """A layer needs no room in reserve once it is being placed itself."""
        counted = item.peak == self.size and item.seen < self._measured and (item.is_module or not self._measured)
        if counted:
            self._unseen -= item.layers.count(item.peak) or 1
        if self._unseen <= 0:
            self.measure()
        item.seen = self._measured


class _Waiting:
    """What has no device yet, in order.

    Attributes:
        items: What waits, by name.
        opened: Of each opened module the names of what is right below it.
        loose: Of each opened module the full names of the buffers that it holds itself.
        aliases: Of each opened module the second names of what it holds twice, with the first ones.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int | float], no_split: Collection[str]) -> None:
        self._sizes, self._no_split = sizes, no_split
        self._layers: list[int | float] = []
        self._spans: dict[str, tuple[int, int]] = {}
        for name, child in model.named_children():
            self._find_layers(name, child)
        self.items: dict[str, _Item] = {}
        self.opened: dict[str, list[str]] = {}
        self.loose: dict[str, list[str]] = {}
        self.aliases: dict[str, dict[str, str]] = {}
        first = self._pieces("", model)
        self.items.update((item.name, item) for item in first)
        self.reserve = _Reserve(self._layers, first)
        # Read from the end. What was placed or opened meanwhile is noticed when its turn comes.
        self._stack: list[_Item] = first[::-1]

    def _find_layers(self, name: str, module: nn.Module) -> None:
        begin = len(self._layers)
        if is_whole(module, self._no_split):
            self._layers.append(self._sizes.get(name, 0))
        else:
            for last, child in module.named_children():
                self._find_layers(f"{name}.{last}", child)
        self._spans[name] = (begin, len(self._layers))

    def _pieces(self, name: str, module: nn.Module, seen: int = -1) -> list[_Item]:
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
        return [self._item(prefix + last, thing, seen) for last, thing in (*parameters, *children, *buffers)]

    def _item(self, name: str, thing: nn.Module | torch.Tensor, seen: int) -> _Item:
        begin, end = self._spans[name] if isinstance(thing, nn.Module) else (0, 0)
        return _Item(
            name, thing, self._sizes.get(name, 0), self._layers[begin:end], is_whole(thing, self._no_split), seen
        )

    def pop(self) -> _Item | None:
        """Take the first item out; None if nothing waits."""
        while self._stack:
            item = self._stack.pop()
            if item.pieces is not None:
                self._stack += reversed(item.pieces)
            elif self.items.get(item.name) is item:
                self.remove(item)
                return item
        return None

    def push(self, items: Sequence[_Item]) -> None:
        """Put items before all others."""
        self._stack += reversed(items)
        for item in items:
            self.items[item.name] = item
            self.reserve.enter(item)

    def advance(self, item: _Item) -> None:
        """Make one that waits already the first."""
        self._stack.append(item)

    def remove(self, item: _Item) -> None:
        """Take an item out, wherever it waits."""
        del self.items[item.name]
        self.reserve.leave(item)

    def split(self, item: _Item) -> None:
        """Have the pieces of an item that was taken out wait before all others."""
        self.push(self._pieces(item.name, item.thing))
        self.reserve.measure()

    def open(self, item: _Item) -> None:
        """Have the pieces of an item that waits wait in its place."""
        item.pieces = self._pieces(item.name, item.thing, item.seen)
        for piece in item.pieces:
            if not piece.is_module:
                piece.seen = 0  # no layer of the first measurement
        del self.items[item.name]
        self.items.update((piece.name, piece) for piece in item.pieces)

    def holder(self, name: str) -> str | None:
        """Return the name of what waits and is, or holds, the module or tensor of a name."""
        return next((part for part in name_and_parents(name) if part in self.items), None)

    def is_whole(self, name: str) -> bool:
        """Say whether what waits under a name goes to one device as it is."""
        return self.items[name].whole

    def in_order(self) -> Iterator[_Item]:
        """Yield what waits, first to last."""
        stack = list(self._stack)
        while stack:
            item = stack.pop()
            if item.pieces is not None:
                stack += reversed(item.pieces)
            elif self.items.get(item.name) is item:
                yield item


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


class _Planner:
    """Fills devices one after the other with the modules of a model, in the order in which they are registered.

    The first accelerator, where offloaded layers are brought to, and the host memory, where they wait for it, keep room
    for the largest layer. What does not fit is split; what cannot be split is the first on the next device.

    Args:
        model: The model to place.
        budgets: Bytes per device, in the order in which they are filled; ``"disk"`` takes whatever is left.
        no_split: Names of classes that stay on one device.
        dtypes: Arguments of `compute_module_sizes`.
        offload_buffers: Whether buffers of offloaded modules stay off the executing device too.
        fallback: Whether an otherwise empty device gets a deeper module that fits.
        verbose: Whether to print each step.
        follow_ties: Whether what is tied to a module that comes along because of a tie comes along as well.
    """

    def __init__(
        self,
        model: nn.Module,
        budgets: Mapping[Key, int | float],
        no_split: Collection[str],
        dtypes: Mapping[str, Any],
        offload_buffers: bool = False,
        fallback: bool = False,
        verbose: bool = False,
        follow_ties: bool = False,
    ) -> None:
        self.budgets: dict[Key, int | float | None] = {**budgets, UNBOUNDED: None}
        self.no_split, self.fallback, self.verbose = no_split, fallback, verbose
        self.devices = list(self.budgets)
        accelerators = [device for device in self.devices if device not in ("cpu", UNBOUNDED)]
        self.executing = ["mps"] if "mps" in self.devices else [*accelerators[:1], "cpu"]
        self.sizes = compute_module_sizes(model, **dtypes)
        self.buffer_sizes = {} if offload_buffers else compute_module_sizes(model, **dtypes, buffers_only=True)
        self.ties = Ties(find_tied_parameters(model), follow_ties)
        self.waiting = _Waiting(model, self.sizes, no_split)
        self.reserve = self.waiting.reserve
        self.placed: dict[str, Key] = {}
        self.refusals: list[Refusal] = []
        self.used: Counter[Key] = Counter()
        self.kept: dict[Key, int | float] = {}
        self._position = 0

    def plan(self) -> Plan:
        """Place everything."""
        while (item := self.waiting.pop()) is not None:
            self._treat(item)
        for module, buffers in self.waiting.loose.items():
            if buffers:
                self._join_buffers(module, buffers)
        buffers: Counter[Key] = Counter()
        for name, device in self.placed.items():
            buffers[device] += self.buffer_sizes.get(name, 0)
        modules = Counter(self.placed.values())
        uses = (
            DeviceUse(d, self.budgets[d], self.kept.get(d, 0), self.used[d], buffers[d], modules[d])
            for d in self.devices
        )
        return Plan(self._with_aliases(), tuple(uses), tuple(self.refusals), self.ties.groups)

    @property
    def device(self) -> Key:
        """The device that is being filled."""
        return self.devices[self._position]

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
        company = Company(item.name, self.ties, self.sizes, self.waiting.holder)
        while company.size > self.left - item.size:
            partner = company.first_splittable(self.waiting.is_whole) if item.size <= self.left else None
            if partner is not None:
                self._refuse(item, company, f"tied to {partner}, which was split")
                self._split_partner(item, company, self.waiting.items[partner])
            # What fills a device exactly is too large where it is tied, as upstream.
            elif item.size >= self.left and not item.whole:
                self._refuse(item, None, "it was split")
                self.waiting.split(item)
                return
            else:
                self._next_device(item, company)
                return
        self._place(item, company)

    def _split_partner(self, item: _Item, company: Company, partner: _Item) -> None:
        """Split a tied module, so that only the part with the tied weights has to come along."""
        self.waiting.open(partner)
        # The reserve is measured with the item among what waits, although it is about to be looked at again.
        self.reserve.enter(item)
        self.reserve.measure()
        self.reserve.leave(item)
        self.reserve.look_at(item)
        company.opened(partner.name)

    def _place(self, item: _Item, company: Company) -> None:
        partners = company.partners()
        if self.verbose:
            print(f"Putting {', '.join([item.name, *partners])} ({item.size + company.size} bytes) on {self.device}.")
        self.ties.settled.update(company.groups)
        for partner in partners:
            self.waiting.remove(self.waiting.items[partner])
        for name in (item.name, *partners):
            self._settle(name, self.device)

    def _join_buffers(self, module: str, buffers: Sequence[str]) -> None:
        """Put the buffers of a module that was opened onto a device that has other parts of it, or on a later one."""
        present = dict.fromkeys(device for _, device in self._entries(module))
        first = self.devices.index(next(iter(present), UNBOUNDED))
        for name in buffers:
            for device in (*present, *self.devices[first:]):
                budget = self.budgets[device]
                if budget is None or self.used[device] + self.sizes.get(name, 0) <= budget:
                    self._settle(name, device)
                    break

    def _settle(self, name: str, device: Key) -> None:
        self.placed[name] = device
        self.used[device] += self.sizes.get(name, 0)

    def _next_device(self, item: _Item, company: Company) -> None:
        together = f"tied to {', '.join(company.partners())}, and " if company.size else ""
        self._refuse(item, company, f"{together}it cannot be split", emptied=not self.used[self.device])
        self.waiting.push([item])
        executes = self.device in self.executing
        deeper = self.fallback and executes and not self.used[self.device]
        if deeper and self._go_deeper(item, item.size + company.size):
            return
        if executes:
            self.kept[self.device] = self.reserve.size
        self._position += 1

    def _refuse(self, item: _Item, company: Company | None, cause: str, emptied: bool = False) -> None:
        size = item.size + (company.size if company is not None else 0)
        self.refusals.append(Refusal(item.name, size, self.device, self.left, self.reserve_here, cause, emptied))
        if self.verbose:
            space = f"space available {max(0, self.left)}, needed {size}"
            print(f"Not enough space on {self.device} for {item.name} ({space}): {cause}.")

    def _go_deeper(self, refused: _Item, needed: int | float) -> bool:
        """Look for a module further on, however deep, that fits onto an empty device, and have it treated next."""
        # What did not fit waits again, so there has to be room for it too, and for what is tied to it.
        limit = self.budgets[self.device] - max(self.reserve.size, needed)
        tops = ((item.name, item.thing) for item in self.waiting.in_order() if item is not refused)
        path = next(fitting(tops, self.sizes, limit, self.no_split, self.ties, self.waiting.holder), None)
        if path is None:
            return False
        for name in path[:-1]:
            self.waiting.open(self.waiting.items[name])
        self.waiting.advance(self.waiting.items[path[-1]])
        return True

    def _with_aliases(self) -> dict[str, Key]:
        """Add the second names of what one module holds twice, which its list of children and tensors leaves out."""
        found = dict(self.placed)
        for parent, aliases in self.waiting.aliases.items():
            prefix = f"{parent}." if parent else ""
            for last, first in aliases.items():
                for name, device in self._entries(prefix + first):
                    found[prefix + last + name] = device
        return found

    def _entries(self, name: str) -> Iterator[tuple[str, Key]]:
        """Yield what follows a name in the entries of a plan at or below it."""
        if name in self.placed:
            yield "", self.placed[name]
            return
        same = self.waiting.aliases.get(name, {})
        for last in (*self.waiting.opened.get(name, ()), *same):
            for rest, device in self._entries(f"{name}.{same.get(last, last)}"):
                yield f".{last}{rest}", device


def fitting(
    items: Iterable[tuple[str, nn.Module | torch.Tensor]],
    sizes: Mapping[str, int | float],
    limit: int | float,
    no_split: Collection[str],
    ties: Ties,
    holder: Callable[[str], str | None],
) -> Iterator[list[str]]:
    """Yield the modules, however deep, that fit into a limit together with all that they are tied to.

    Args:
        items: Names and modules that wait for a device.
        sizes: Bytes by name, tied parameters counted once.
        limit: Bytes.
        no_split: Names of classes that stay whole.
        ties: The ties of the model.
        holder: Returns the name of the waiting module that a tensor lies in.

    Returns:
        For each the names of the modules around it, outermost first, and its own.
    """

    def fits(path: list[str]) -> bool:
        own = sizes.get(path[-1], 0)
        if own > limit or path[-1] not in ties.of:
            return own <= limit

        def beside(tensor: str) -> str | None:
            # As if the modules around the candidate were open.
            around = [outer for outer in path if f"{tensor}.".startswith(f"{outer}.")]
            if not around or len(around) == len(path):
                return None if around else holder(tensor)
            start = len(around[-1]) + 1
            return around[-1] + "." + tensor[start:].partition(".")[0]

        return Company(path[-1], ties, sizes, beside).size <= limit - own

    for top, module in items:
        stack: list[tuple[list[str], nn.Module | torch.Tensor]] = [([top], module)]
        while stack:
            path, thing = stack.pop()
            if fits(path):
                yield path
            elif not is_whole(thing, no_split):
                stack += [([*path, name], child) for name, child in reversed(parts(path[-1], thing))]


def parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return the parameters that a module holds itself and its children, with full names.

    Args:
        name: The module's own full name.
        module: The module.
    """
    prefix = f"{name}." if name else ""
    found = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(prefix + last, part) for last, part in found]
