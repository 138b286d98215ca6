"""Filling devices with the modules of a model, one device after the other: what `infer_auto_device_map` runs.

The work grows linearly with the number of modules. Names lead to items through dictionaries, the largest waiting layer is
kept in buckets by size, and nothing is ever searched for from the beginning.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accelerate.offload.sizes import is_whole
from accelerate.offload.sources import listed
from accelerate.offload.tied import Company, Ties, name_and_parents
from accelerate.offload.waiting import Catalogue, Item, Reserve, Waiting

Key = int | str
UNBOUNDED = "disk"


@dataclass(frozen=True)
class DeviceUse:
    """What a plan does with one device.

    Attributes:
        device: The device, as in a device map.
        budget: Bytes that it may take; None: any number.
        reserve: Bytes kept free for the largest layer that was still waiting when the device was left.
        layer: The name of that layer.
        used: Bytes placed there.
        buffers: Bytes of buffers among them that stay on the executing device, where this one is offloaded.
        modules: How many modules and single tensors are placed there.
    """

    device: Key
    budget: int | float | None
    reserve: int | float
    layer: str
    used: int | float
    buffers: int | float
    modules: int


@dataclass(frozen=True)
class Refusal:
    """Something that did not fit onto a device.

    Attributes:
        name: Name of the module or tensor.
        size: Bytes that it takes, with what is tied to it.
        device: The device.
        left: Bytes that were left for it there.
        reserve: Bytes that were kept free there for the largest layer.
        layer: The name of that layer.
        cause: Why it did not fit, and what was done about it.
        emptied: Whether the device was left for the next one although nothing had been placed on it.
    """

    name: str
    size: int | float
    device: Key
    left: int | float
    reserve: int | float
    layer: str
    cause: str
    emptied: bool = False


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


def make_plan(catalogue: Catalogue, budgets: Mapping[Key, int | float], **options: bool) -> Plan:
    """Return a plan for a model.

    What is tied to a module that comes along because of a tie is brought along as well only where a tied parameter would
    have two devices otherwise: all of them together may be too much for a device.

    Args:
        catalogue: The model's.
        budgets: Bytes per device, as for `Planner`.
        **options: Other arguments of `Planner`.
    """
    planner = Planner(catalogue, budgets, **options)
    plan = planner.plan()
    if all(len({_device_of(name, plan.device_map) for name in group}) == 1 for group in plan.tied):
        return plan
    if planner.verbose:
        print("\nTied parameters have several devices: starting again, and following the ties of tied modules too.")
    return Planner(catalogue, budgets, **options, follow_ties=True).plan()


def _device_of(name: str, device_map: Mapping[str, Key]) -> Key | None:
    return next((device_map[part] for part in name_and_parents(name) if part in device_map), None)


class Planner:
    """Fills devices one after the other with the modules of a model, in the order in which they are registered.

    The first accelerator, where offloaded layers are brought to, and the host memory, where they wait for it, keep room
    for the largest layer. What does not fit is split; what cannot be split is the first on the next device.

    Args:
        catalogue: That of the model to place.
        budgets: Bytes per device, in the order in which they are filled; ``"disk"`` takes whatever is left.
        offload_buffers: Whether buffers of offloaded modules stay off the executing device too.
        fallback: Whether an otherwise empty device gets a deeper module that fits.
        verbose: Whether to print each step.
        follow_ties: Whether what is tied to a module that comes along because of a tie comes along as well.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        budgets: Mapping[Key, int | float],
        offload_buffers: bool = False,
        fallback: bool = False,
        verbose: bool = False,
        follow_ties: bool = False,
    ) -> None:
        self.budgets: dict[Key, int | float | None] = {**budgets, UNBOUNDED: None}
        self.offload_buffers = offload_buffers
        self.fallback = fallback
        self.verbose = verbose
        self.devices = list(self.budgets)
        accelerators = [device for device in self.devices if device not in ("cpu", UNBOUNDED)]
        self.executing = ["mps"] if "mps" in self.devices else [*accelerators[:1], "cpu"]
        self.catalogue = catalogue
        self.ties = Ties(catalogue.tied, follow_ties)
        self.waiting = Waiting(catalogue)
        self.placed: dict[str, Key] = {}
        self.refusals: list[Refusal] = []
        self.used: dict[Key, int | float] = dict.fromkeys(self.devices, 0)
        self.buffers: dict[Key, int | float] = dict.fromkeys(self.devices, 0)
        self.count: dict[Key, int] = dict.fromkeys(self.devices, 0)
        self.kept: dict[Key, tuple[int | float, str]] = {}
        self._position = 0
        self._search: tuple[tuple[Key, int | float], Iterator[list[str]]] | None = None

    def plan(self) -> Plan:
        """Place everything."""
        while (item := self.waiting.pop()) is not None:
            self._treat(item)
        for module, buffers in self.waiting.loose.items():
            if buffers:
                self._join_buffers(module, buffers)
        uses = (
            DeviceUse(d, self.budgets[d], *self.kept.get(d, (0, "")), self.used[d], self.buffers[d], self.count[d])
            for d in self.devices
        )
        return Plan(self._with_aliases(), tuple(uses), tuple(self.refusals), self.catalogue.tied)

    @property
    def device(self) -> Key:
        """The device that is being filled."""
        return self.devices[self._position]

    @property
    def left(self) -> int | float:
        """Bytes that the device can still take."""
        budget = self.budgets[self.device]
        if budget is None:
            return float("inf")
        return budget - self.reserve_here - self.used[self.device]

    @property
    def reserve_here(self) -> int | float:
        """Bytes that the device keeps free for the largest layer."""
        return self.reserve.size if self.device in self.executing else 0

    @property
    def reserve(self) -> Reserve:
        """What is kept free for the largest layer."""
        return self.waiting.reserve

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text)

    def _treat(self, item: Item) -> None:
        self._say(f"\nTreating {'module' if item.is_module else 'tensor'} {item.name}.")
        self.reserve.look_at(item)
        company = Company(item.name, self.ties, self.catalogue.sizes, self.waiting.holder)
        while not company.fits(self.left - item.size):
            if item.size > self.left and not item.whole:
                self._split(item)
                return
            partner = company.first_splittable(self.waiting.is_whole) if item.size <= self.left else None
            if partner is None and item.size == self.left and not item.whole:
                # As upstream, to which what fills a device exactly is too large where it is tied.
                self._split(item)
                return
            if partner is None:
                self._next_device(item, company)
                return
            self._split_partner(item, company, self.waiting.items[partner])
        self._place(item, company)

    def _split(self, item: Item) -> None:
        self._say(f"{item.name} does not fit on {self.device} as a whole: splitting it.")
        self._refuse(item, item.size, f"{self._shortage()}; it was split")
        self._search = None
        self.waiting.split(item)
        self.reserve.measure(modules_only=True)

    def _split_partner(self, item: Item, company: Company, partner: Item) -> None:
        """Split a tied module, so that only the part with the tied weights has to come along."""
        self._refuse(item, item.size + company.size, f"tied to {partner.name}, which was split")
        self._search = None
        self.waiting.open(partner)
        # The reserve is measured with the item among what waits, although it is about to be looked at again.
        self.waiting.push([item])
        self.reserve.measure(modules_only=True)
        self.waiting.pop()
        self.reserve.look_at(item)
        company.opened(partner.name)

    def _place(self, item: Item, company: Company) -> None:
        device, partners = self.device, company.partners()
        size = item.size + company.size
        self._say(f"Putting {item.name} {'and ' + ', '.join(partners) if partners else ''} (size={size}) on {device}.")
        self.ties.settled.update(company.groups)
        for partner in partners:
            self.waiting.remove(self.waiting.items[partner])
        for name in (item.name, *partners):
            self._settle(name, device, self.catalogue.sizes.get(name, 0))

    def _join_buffers(self, module: str, buffers: Sequence[str]) -> None:
        """Put the buffers of a module that was opened onto a device that has other parts of it, or on a later one."""
        present = dict.fromkeys(device for _, device in self._entries(module))
        first = self.devices.index(next(iter(present), UNBOUNDED))
        for name in buffers:
            size = self.catalogue.sizes.get(name, 0)
            for device in (*present, *self.devices[first:]):
                budget = self.budgets[device]
                if budget is None or self.used[device] + size <= budget:
                    self._settle(name, device, size)
                    break

    def _settle(self, name: str, device: Key, size: int | float) -> None:
        self.placed[name] = device
        self.used[device] += size
        self.count[device] += 1
        if not self.offload_buffers:
            self.buffers[device] += self.catalogue.buffers.get(name, 0)

    def _next_device(self, item: Item, company: Company) -> None:
        left, partners = self.left, company.partners()
        size = item.size + company.size
        self._say(f"Not enough space on {self.device} (space available {max(0, left)}, needed {size}).")
        self._refuse(item, size, self._cause(item, partners), emptied=self.used[self.device] == 0)
        self.waiting.push([item])
        deeper = self.fallback and self.used[self.device] == 0 and self.device in self.executing
        if deeper and self._go_deeper(item, size):
            return
        if self.device in self.executing:
            self.kept[self.device] = (self.reserve.size, self.reserve.layer)
        self._position += 1

    def _refuse(self, item: Item, size: int | float, cause: str, emptied: bool = False) -> None:
        layer = self.reserve.layer if self.device in self.executing else ""
        self.refusals.append(
            Refusal(item.name, size, self.device, self.left, self.reserve_here, layer, cause, emptied)
        )

    def _shortage(self) -> str:
        if not self.budgets[self.device]:
            return "the device has no budget"
        if not self.used[self.device]:
            if self.device in self.executing and self.budgets[self.device] < self.reserve.size:
                return f"the budget is smaller than the largest layer, {self.reserve.layer}"
            return (
                "larger than the budget"
                if not self.reserve_here
                else "larger than the budget without what is kept free"
            )
        return "larger than what is left"

    def _cause(self, item: Item, partners: Sequence[str]) -> str:
        if item.size <= self.left:
            return f"tied to {listed(partners)}, so that all of them need room together"
        kind = type(item.thing).__name__
        if not item.is_module:
            reason = "it is a single tensor"
        elif kind in self.catalogue.no_split:
            reason = f"class {kind} is in no_split_module_classes"
        else:
            reason = f"class {kind} has no submodules"
        return f"{self._shortage()}; it cannot be split: {reason}"

    def _go_deeper(self, refused: Item, needed: int | float) -> bool:
        """Look for a module further on, however deep, that fits onto an empty device, and have it treated next."""
        # What did not fit waits again, so there has to be room for it too, and for what is tied to it.
        limit = self.budgets[self.device] - max(self.reserve.size, needed)
        # Things without tensors leave a device empty; what was refused before them need not be tried again.
        if self._search is None or self._search[0] != (self.device, limit):
            tops = ((item.name, item.thing) for item in self.waiting.in_order() if item is not refused)
            known = self.catalogue
            found = fitting(tops, known.sizes, limit, known.no_split, self.ties, self.waiting.holder)
            self._search = ((self.device, limit), found)
        path = next(self._search[1], None)
        if path is None:
            self._search = None
            return False
        for name in path[:-1]:
            if name in self.waiting.items:
                self.waiting.open(self.waiting.items[name])
                if name in self.ties.of:
                    self._search = None  # what is tied to it takes less now
        if path[-1] in self.ties.of:
            self._search = None
        self.waiting.advance(self.waiting.items[path[-1]])
        return True

    def _with_aliases(self) -> dict[str, Key]:
        """Add the second names of what one module holds twice, which its list of children and tensors leaves out."""
        found = dict(self.placed)
        for parent, aliases in list(self.waiting.aliases.items()):
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
            around = [outer for outer in path if below(tensor, outer)]
            if not around or len(around) == len(path):
                return None if around else holder(tensor)
            start = len(around[-1]) + 1
            return around[-1] + "." + tensor[start:].partition(".")[0]

        return Company(path[-1], ties, sizes, beside).fits(limit - own)

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


def below(name: str, module: str) -> bool:
    """Say whether a name is that of a module, or of something in it."""
    return name == module or name.startswith(f"{module}.")
