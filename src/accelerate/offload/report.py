"""Tables for people: what a computed device map does and why, and where the tensors of a model are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.diagnostics.table import table
from accelerate.offload.placement import Device, as_device
from accelerate.offload.sizes import format_bytes
from accelerate.offload.sources import listed

if TYPE_CHECKING:
    from accelerate.offload.planner import DeviceUse, Refusal

_MOST_LINES = 30


def placement_table(devices: "Sequence[DeviceUse]", refusals: "Sequence[Refusal]") -> str:
    """Return the table that ``infer_auto_device_map(explain=True)`` prints.

    Args:
        devices: What the plan does with each device.
        refusals: What did not fit.
    """
    rows = []
    for use in devices:
        budget = free = "unlimited"
        if use.budget is not None and use.budget != float("inf"):
            budget, free = format_bytes(use.budget), format_bytes(use.budget - use.used)
        reserve = f"{format_bytes(use.reserve)} ({use.layer})" if use.layer else "-"
        rows.append([str(use.device), budget, reserve, format_bytes(use.used), free, str(use.modules)])
    lines = [table(["device", "budget", "kept free for the largest layer", "used", "free", "modules"], rows)]
    if refusals:
        lines += ["", "What did not fit:"]
    for refusal in refusals[:_MOST_LINES]:
        left = f"{format_bytes(max(0, refusal.left))} left"
        lines.append(f"  {refusal.name} ({format_bytes(refusal.size)}) on {refusal.device} ({left}): {refusal.cause}")
    if len(refusals) > _MOST_LINES:
        lines.append(f"  ... and {len(refusals) - _MOST_LINES} more")
    return "\n".join(lines)


@dataclass(frozen=True)
class Place:
    """The tensors of a model that are in one place between forwards.

    Attributes:
        device: A torch device, such as ``"cuda:0"``, or ``"disk"``.
        kept: ``"there"`` for tensors that stay in the modules; else where offloaded ones wait: ``"host memory"`` or
            ``"files"``.
        parameters: Bytes of parameters, a tied one counted once unless it was written to several files. Of those that are
            spread over processes (DTensor), the part of this process.
        buffers: Bytes of buffers.
        modules: How many modules have tensors of their own there.
        mapped: Bytes of what is read in place from safetensors files, in the dtype that the model wants.
        written: Bytes in ``.dat`` files of an offload folder.
        runs_on: The devices that the modules run on.
        largest: Name of the module that brings the most bytes along when it visits the device that it runs on.
        largest_bytes: How many bytes these are.
    """

    device: str
    kept: str
    parameters: int
    buffers: int
    modules: int
    mapped: int = 0
    written: int = 0
    runs_on: tuple[str, ...] = ()
    largest: str | None = None
    largest_bytes: int = 0

    def _row(self) -> list[str]:
        kept = self.kept
        if kept == "files":
            shares = [(self.mapped, "mapped from safetensors"), (self.written, "in .dat files")]
            kept = ", ".join(f"{format_bytes(size)} {what}" for size, what in shares if size)
        visitor = (
            "-" if self.largest is None else f"{format_bytes(self.largest_bytes)} ({self.largest or 'the model'})"
        )
        sizes = [format_bytes(self.parameters), format_bytes(self.buffers)]
        return [self.device, *sizes, str(self.modules), kept or "-", ", ".join(self.runs_on), visitor]


@dataclass(frozen=True)
class DeviceMapReport:
    """Where the tensors of a model are; ``str()`` gives a table.

    Attributes:
        places: One entry per device, and per way in which tensors are kept there.
        without_data: Names of tensors that are on the meta device although no hook has their data.
    """

    places: tuple[Place, ...]
    without_data: tuple[str, ...]

    def __str__(self) -> str:
        head = ["device", "parameters", "buffers", "modules", "kept between forwards", "runs on", "largest visitor"]
        lines = [table(head, [place._row() for place in self.places])]
        if self.without_data:
            lines += ["", f"Without data (on meta, and no hook has them): {listed(self.without_data, _MOST_LINES)}"]
        return "\n".join(lines)


@dataclass
class _Tally:
    """What is counted up for one `Place`."""

    parameters: int = 0
    buffers: int = 0
    mapped: int = 0
    written: int = 0
    modules: set[int] = field(default_factory=set)
    runs_on: dict[str, None] = field(default_factory=dict)
    visitors: dict[str, int] = field(default_factory=dict)

    def place(self, device: str, kept: str) -> Place:
        largest = max(self.visitors, key=lambda name: self.visitors[name], default=None)
        return Place(
            device,
            kept,
            self.parameters,
            self.buffers,
            len(self.modules),
            self.mapped,
            self.written,
            tuple(self.runs_on),
            largest,
            self.visitors.get(largest, 0),
        )


@dataclass(frozen=True)
class _Governor:
    """The hook that decides on the tensors of a module: its own one, or one further up that includes submodules."""

    path: str
    offload: Any = None
    whole: bool = False
    runs_on: str | None = None


def device_map_report(model: nn.Module) -> DeviceMapReport:
    """Return a report of where a model's tensors are kept, where they are brought to, and which have no data.

    Nothing is moved or read; the model may be dispatched, offloaded, on the meta device or none of these.

    Args:
        model: The model.

    Returns:
        The report; print it for a table.

    Raises:
        ValueError: It is no module.

    Example:
        >>> report = device_map_report(nn.Linear(2, 2))
        >>> [(place.device, place.parameters) for place in report.places]
        [('cpu', 24)]
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}, which is no torch.nn.Module. Of a pipeline, give one model at a time."
        )
    tallies: dict[tuple[str, str], _Tally] = {}
    counted: set[Any] = set()
    known: set[int] = set()
    empty: dict[str, int] = {}
    for path, module, governor in _with_governors(model):
        for name, tensor, is_buffer in _own_tensors(module):
            full = f"{path}.{name}" if path else name
            found = _where(tensor, full, governor)
            if found is None:
                empty[full] = id(tensor)
                continue
            place, source, identity = found
            known.add(id(tensor))
            tally = tallies.setdefault(place, _Tally())
            tally.modules.add(id(module))
            local = getattr(tensor, "_local_tensor", tensor)
            size = local.numel() * local.element_size()
            device = governor.runs_on or str(tensor.device)
            tally.runs_on[device] = None
            if place[1] != "there" or (governor.whole and device != place[0]):
                tally.visitors[governor.path] = tally.visitors.get(governor.path, 0) + size
            if identity in counted:
                continue
            counted.add(identity)
            for kind in ("buffers" if is_buffer else "parameters", source):
                if kind:
                    setattr(tally, kind, getattr(tally, kind) + size)
    places = tuple(tally.place(*place) for place, tally in tallies.items())
    return DeviceMapReport(places, tuple(name for name, tensor in empty.items() if tensor not in known))


def _with_governors(model: nn.Module) -> Iterator[tuple[str, nn.Module, _Governor]]:
    """Yield every module once, with its name and the hook that decides on its own tensors."""
    seen: set[int] = set()
    stack = [("", model, _Governor(""))]
    while stack:
        path, module, above = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own, below = _governors(module, path, above)
        yield path, module, own
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child, below) for name, child in module.named_children()]
        stack += reversed(children)


def _governors(module: nn.Module, path: str, above: _Governor) -> tuple[_Governor, _Governor]:
    """Return which hook decides on a module's own tensors, and which on those below it. Hooks are known by attributes."""
    hook = module.__dict__.get("_hf_hook")
    own, below = above, above
    for candidate in (hook, *getattr(hook, "hooks", ())):
        device = getattr(candidate, "execution_device", None)
        if device is None:
            continue
        device = _full_name(device)
        if hasattr(candidate, "prev_module_hook"):  # CpuOffload: the module visits the device as a whole
            own = below = _Governor(path, None, True, device)
        elif getattr(candidate, "offload", False):
            own = _Governor(path, candidate, candidate.place_submodules, device)
            below = own if candidate.place_submodules else below
        elif not above.whole:
            own = _Governor(path, None, False, device)
            below = own if getattr(candidate, "place_submodules", False) else below
    return own, below


def _full_name(device: Device) -> str:
    """The name that tensors there give to their device, however a hook was told of it: as 0, "cuda" or "cuda:0"."""
    try:
        found = as_device(device)
    except ValueError:  # a report is no place to complain of it
        return str(device)
    if found.type in ("cpu", "meta"):
        return found.type
    return f"{found.type}:{found.index or 0}"


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for own, is_buffer in ((module._parameters, False), (module._buffers, True)):
        for name, tensor in own.items():
            if tensor is not None:
                yield name, tensor, is_buffer


def _where(tensor: torch.Tensor, name: str, governor: _Governor) -> tuple[tuple[str, str], str, Any] | None:
    """Return the device and manner in which a tensor is kept, the kind of file that it is in, and what tells tied ones."""
    if tensor.device.type != "meta":
        return (str(tensor.device), "there"), "", id(tensor)
    weights = getattr(governor.offload, "weights_map", None)
    key = name[len(governor.path) + 1 :] if governor.path else name
    if weights is None or key not in weights:
        return None
    while hasattr(weights, "dataset"):  # the part of a mapping below a prefix
        full = f"{weights.prefix}{key}"
        weights, key = weights.dataset, full if full in weights.dataset else key
    memory = getattr(weights, "state_dict", weights)
    index = getattr(weights, "index", {})
    if key in index and not (isinstance(memory, Mapping) and key in memory):
        entry = index[key]
        file = entry.get("safetensors_file")
        if file is not None:
            return ("disk", "files"), "mapped", (file, entry.get("weight_name", key))
        return ("disk", "files"), "written", (getattr(weights, "save_folder", None), entry.get("dat_name", key))
    value = memory.get(key) if isinstance(memory, dict) else None
    device = "cpu" if value is None else str(value.device)
    return (device, "host memory"), "", (id(weights), key) if value is None else (value.data_ptr(), value.shape)
