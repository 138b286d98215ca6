"""Deciding which module goes to which device, and checking such a decision."""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.offload.memory import get_max_memory
from accelerate.offload.sizes import (
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
)
from accelerate.offload.tied import check_tied_parameters_in_config, find_tied_parameters, get_module_size_with_ties

logger = logging.getLogger("accelerate.utils.modeling")

Item = tuple[str, nn.Module | torch.Tensor]


def _below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def _ties_leaving(name: str, tied_parameters: Iterable[Sequence[str]]) -> list[str]:
    """Parameters outside a module that are tied to one inside it."""
    leaving = []
    for group in tied_parameters:
        outside = [parameter for parameter in group if not _below(parameter, name)]
        if 0 < len(outside) < len(group):
            leaving += outside
    return leaving


def _is_whole(item: nn.Module | torch.Tensor, no_split: Iterable[str]) -> bool:
    """Whether an item goes to one device as it is: a tensor, a leaf module, or a class that must not be split."""
    if not isinstance(item, nn.Module) or type(item).__name__ in no_split:
        return True
    return next(item.children(), None) is None


def _children(name: str, module: nn.Module) -> list[Item]:
    found = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{child_name}" if name else child_name, child) for child_name, child in found]


def fallback_allocate(
    modules: list[Item],
    module_sizes: Mapping[str, int],
    size_limit: int | float,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | torch.Tensor | None, list[Item]]:
    """Find the first module, however deep, that fits into a limit, for a device that would otherwise stay empty.

    Args:
        modules: Names and modules that wait for a device; the list stays as it is.
        module_sizes: As `compute_module_sizes` returns it.
        size_limit: Bytes that the module may take, modules tied to it included.
        no_split_module_classes: Names of classes whose instances stay whole.
        tied_parameters: As `find_tied_parameters` returns it.

    Returns:
        Name and module, or None twice, and what waits then: the modules around the one found, opened up.
    """
    no_split = set(no_split_module_classes or ())
    waiting = list(modules)
    position = 0
    while position < len(waiting):
        name, item = waiting[position]
        others = waiting[:position] + waiting[position + 1 :]
        size, _, _ = get_module_size_with_ties(
            _ties_leaving(name, tied_parameters or ()), module_sizes.get(name, 0), module_sizes, others
        )
        if size <= size_limit:
            return name, item, others
        if _is_whole(item, no_split):
            position += 1
        else:
            waiting[position : position + 1] = _children(name, item)
    return None, None, list(modules)


@dataclass
class _Planner:
    """Fills devices one after the other with the modules of a model, in the order in which they are registered.

    Attributes:
        model: The model to place.
        budgets: Bytes per device, in filling order, the unlimited ``"disk"`` last.
        no_split: Names of classes that stay on one device.
        dtypes: Keyword arguments that say in which dtypes the weights will be (``dtype``, ``special_dtypes``).
        offload_buffers: Whether buffers of offloaded modules stay off the main device too.
        fallback: Whether an otherwise empty device gets a deeper module that fits.
        verbose: Whether to print each step.
    """

    model: nn.Module
    budgets: dict[int | str, int | None]
    no_split: list[str]
    dtypes: dict[str, Any]
    offload_buffers: bool
    fallback: bool
    verbose: bool
    queue: list[Item] = field(default_factory=list)
    placed: dict[str, int | str] = field(default_factory=dict)
    needed: dict[int | str, int] = field(default_factory=dict)
    position: int = 0

    def __post_init__(self) -> None:
        self.devices = list(self.budgets)
        self.used: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        self.buffers: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        # Offloaded layers are brought to the first accelerator, or stay in host memory while they wait for it: both
        # keep room for the largest layer.
        self.main = ["mps"] if "mps" in self.devices else [*accelerators[:1], "cpu"]
        self.sizes = compute_module_sizes(self.model, **self.dtypes)
        self.tied = find_tied_parameters(self.model)
        model = self.model
        self.queue = [
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ]
        self.largest, self.largest_names = get_max_layer_size(self.queue, self.sizes, self.no_split)

    def plan(self) -> dict[str, int | str]:
        """Return name to device, for every module or tensor that was not split further."""
        while self.queue:
            name, item = self.queue.pop(0)
            self._say(f"\nTreating {'module' if isinstance(item, nn.Module) else 'tensor'} {name}.")
            self._update_reserve(name)
            outside = _ties_leaving(name, self.tied)
            own = self.sizes.get(name, 0)
            size, partners, _ = get_module_size_with_ties(outside, own, self.sizes, self.queue)
            room = self._room()
            if room is None or self.used[self.device] + size <= room:
                self._place((name, item), partners, size)
            elif self.used[self.device] + own > room and not _is_whole(item, self.no_split):
                self._say(f"{name} does not fit on {self.device} as a whole: splitting it.")
                self.queue[:0] = _children(name, item)
                self._remeasure()
            else:
                self.queue.insert(0, (name, item))
                if self.used[self.device] + own > room or not self._open_partner(partners):
                    self._next_device(size)
        return self.placed

    @property
    def device(self) -> int | str:
        """The device that is being filled."""
        return self.devices[self.position]

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text)

    def _remeasure(self) -> None:
        self.largest, self.largest_names = get_max_layer_size(self.queue, self.sizes, self.no_split)

    def _update_reserve(self, name: str) -> None:
        """A layer needs no room in reserve once it is being placed."""
        self.largest_names = [layer for layer in self.largest_names if not _below(layer, name)]
        if not self.largest_names:
            modules = [(other, item) for other, item in self.queue if isinstance(item, nn.Module)]
            self.largest, self.largest_names = get_max_layer_size(modules, self.sizes, self.no_split)

    def _room(self) -> int | None:
        budget = self.budgets[self.device]
        if budget is None:
            return None
        return budget - self.largest if self.device in self.main else budget

    def _place(self, item: Item, partners: list[str], size: int) -> None:
        device = self.device
        self._say(f"Putting {item[0]} {'and ' + ', '.join(partners) if partners else ''} (size={size}) on {device}.")
        self.used[device] += size
        for name, thing in [item, *((n, t) for n, t in self.queue if n in partners)]:
            self.placed[name] = device
            if isinstance(thing, nn.Module) and not self.offload_buffers:
                self.buffers[device] += compute_module_total_buffer_size(thing, **self.dtypes)
        self.queue = [(name, thing) for name, thing in self.queue if name not in partners]

    def _open_partner(self, partners: list[str]) -> bool:
        """Split the first tied module that can be, so that only the part with the tied weights has to come along."""
        for partner in partners:
            index = next(i for i, (name, _) in enumerate(self.queue) if name == partner)
            module = self.queue[index][1]
            if not _is_whole(module, self.no_split):
                self.queue[index : index + 1] = _children(partner, module)
                self._remeasure()
                return True
        return False

    def _next_device(self, size: int) -> None:
        device = self.device
        room = self._room()
        self._say(f"Not enough space on {device} (space available {max(0, room - self.used[device])}, needed {size}).")
        if self.used[device] == 0:
            if self.fallback and device in self.main and self._place_something_deeper():
                return
            self.needed[device] = size + (self.largest if device in self.main else 0)
        self.position += 1

    def _place_something_deeper(self) -> bool:
        # The module that did not fit waits again, so there has to be room for it too.
        self._remeasure()
        name, item, rest = fallback_allocate(self.queue, self.sizes, self._room(), self.no_split, self.tied)
        if name is None:
            return False
        self.queue = rest
        self._update_reserve(name)
        outside = _ties_leaving(name, self.tied)
        size, partners, _ = get_module_size_with_ties(outside, self.sizes.get(name, 0), self.sizes, self.queue)
        self._place((name, item), partners, size)
        return True

    def report(self) -> None:
        """Tell what the plan means for memory where the user may not expect it."""
        offloaded = sum(self.buffers[device] for device in ("cpu", "disk") if device in self.buffers)
        accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        free = [self.budgets[device] - self.used[device] for device in accelerators]
        if accelerators and offloaded > max(free):
            warnings.warn(
                f"The offloaded layers have {offloaded} bytes of buffers, which stay on the device that runs them, and "
                "that fits the remaining memory of none. If memory runs out, pass `offload_buffers=True`.",
                stacklevel=3,
            )
        if self.needed:
            lines = "".join(f"\n  - {device}: {size} bytes required" for device, size in self.needed.items())
            logger.info(
                "These devices have too little memory for the next module and stay empty in this device map:%s", lines
            )


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Return a device map that fills accelerators first, then the host memory, then the disk.

    Modules go in the order in which they are registered. The first accelerator (and the host memory) keep room for the
    largest layer, because offloaded layers run there. Modules with tied weights go to one device.

    Args:
        model: The model; its tensors may be on the meta device. Tie its weights first.
        max_memory: The most that each device may take, as for `get_max_memory`. None: what is free.
        no_split_module_classes: Names of classes whose instances stay on one device, such as a block with a residual
            connection.
        dtype: Dtype that the weights will be cast to.
        special_dtypes: Exact dtypes for some tensors, by full name.
        verbose: Print each decision.
        clean_result: Replace the children of a module by the module where all are on one device.
        offload_buffers: The buffers of offloaded layers will be offloaded as well.
        fallback_allocation: Where the next module is too large for an empty device, look for one deeper that is not.

    Returns:
        Module (or tensor) name to accelerator index, ``"cpu"`` or ``"disk"``.

    Example:
        >>> infer_auto_device_map(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), max_memory={"cpu": 160})
        {'0': 'cpu', '1': 'disk', '2': 'disk'}
    """
    budgets: dict[int | str, int | None] = dict(get_max_memory(max_memory))
    budgets["disk"] = None
    whole = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes
    planner = _Planner(
        model,
        budgets,
        list(whole or ()),
        {"dtype": dtype, "special_dtypes": special_dtypes},
        offload_buffers,
        fallback_allocation,
        verbose,
    )
    if not planner.tied and check_tied_parameters_in_config(model):
        logger.warning(
            "The model weights are not tied, although its configuration says that they should be. Call "
            "`model.tie_weights()` before `infer_auto_device_map`, or tied layers may land on different devices."
        )
    device_map = planner.plan()
    planner.report()
    return clean_device_map(device_map) if clean_result else device_map


def clean_device_map(device_map: dict[str, int | str], module_name: str = "") -> dict[str, int | str]:
    """Replace the entries below a module by one for the module, wherever they name one device only.

    Args:
        device_map: Module names to devices; changed in place.
        module_name: Where in the model to begin.

    Returns:
        The same dict.

    Example:
        >>> clean_device_map({"a.b": 0, "a.c": 0, "d": "cpu"})
        {'d': 'cpu', 'a': 0}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    for child in dict.fromkeys(prefix + name[len(prefix) :].partition(".")[0] for name in inside):
        if child != module_name:
            clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map covers every tensor of a model, and warn about entries that match nothing.

    Args:
        model: The model to be dispatched.
        device_map: Module or tensor names to devices.

    Raises:
        ValueError: Tensors have no device; the message names them.
    """
    tensors = list(model.state_dict(keep_vars=True))  # non-persistent buffers go where their module goes
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}.union(tensors)
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(f"These device_map keys match no module or tensor of the model: {unknown}", stacklevel=2)
    if "" in device_map:
        return
    missing = [tensor for tensor in tensors if not any(_below(tensor, name) for name in device_map)]
    if missing:
        raise ValueError(
            f"The device_map provided gives no device to these tensors: {', '.join(missing)}. Add them, a module that "
            "holds them, or '' for the rest of the model."
        )
