"""What each rank holds: parameters, gradients, optimizer state, and the peak of activations."""

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.diagnostics.table import table
from accelerate.modules.unwrap import id_tensor_storage
from accelerate.precision.master import local_part, size

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


@dataclass(frozen=True)
class MemoryRow:
    """What one rank holds, in bytes of its own memory; memory that several tensors share counts once.

    Attributes:
        rank: The rank.
        parameters: Its parameters, or its shards of them.
        buffers: Its buffers.
        gradients: Its gradients, whole ones included that wait for an exchange.
        optimizer: The tensors of its optimizers' states.
        activations: The peak of what else there was: see ``MemoryReport.meaning``; None where nothing measured it.
        peak: The peak of the device's allocations, or of the process's resident memory on a CPU.
    """

    rank: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int | None
    peak: int

    @property
    def held(self) -> int:
        """What is held between two steps: all but activations."""
        return self.parameters + self.buffers + self.gradients + self.optimizer


@dataclass(frozen=True)
class MemoryReport:
    """What each rank holds; printed, a table.

    Attributes:
        device: The type of device.
        rows: One for each rank.
        meaning: What the columns "activations" and "peak" are on this device.
    """

    device: str
    rows: tuple[MemoryRow, ...]
    meaning: str

    def __str__(self) -> str:
        head = ("rank", "parameters", "buffers", "gradients", "optimizer", "activations", "peak")
        body = [
            (
                str(row.rank),
                *(size(number) for number in (row.parameters, row.buffers, row.gradients, row.optimizer)),
                "not measured" if row.activations is None else size(row.activations),
                size(row.peak),
            )
            for row in self.rows
        ]
        return "\n".join([f"Memory on {self.device}", table(head, body, right=head, rule=True), self.meaning])


def memory_report(accelerator: "Accelerator") -> MemoryReport:
    """Tell what each rank holds of parameters, gradients and optimizer state, and the peak of activations. All ranks.

    Gradients and optimizer state are there once a step has made them, so call it after the first backward pass.

    Args:
        accelerator: Its prepared models and optimizers are counted.

    Returns:
        The same report on every rank; print it.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(4, 4))
        >>> memory_report(accelerator).rows[0].parameters
        80
    """
    models = accelerator._models
    counted: set[Any] = set()
    held = [
        _storage((tensor for model in models for tensor in model.parameters()), counted),
        _storage((tensor for model in models for tensor in model.buffers()), counted),
        _storage((gradient for model in models for gradient in _gradients(model)), counted),
        _storage((tensor for item in accelerator._optimizers for tensor in tensors_in(dict(item.state))), counted),
    ]
    measured = getattr(accelerator, "_activations_peak", None)
    peak, left, meaning = _peak(accelerator.device, counted)
    activations = measured if measured is not None else left
    if measured is not None:
        meaning = f"activations: what autograd kept for backward at most, inside measure_activations(). {meaning}"
    elif left is None:
        meaning = f"activations: not measured on {accelerator.device.type!r}; run a step inside measure_activations(). {meaning}"
    numbers = [accelerator.process_index, *held, -1 if activations is None else activations, peak]
    lines = accelerator.gather(torch.tensor([numbers], dtype=torch.int64, device=accelerator.device)).tolist()
    rows = tuple(MemoryRow(*line[:5], activations=line[5] if line[5] >= 0 else None, peak=line[6]) for line in lines)
    return MemoryReport(accelerator.device.type, rows, meaning)


def _storage(tensors: Iterable[torch.Tensor], counted: set[Any]) -> int:
    """Return the bytes of the memory under some tensors that was not counted before, and count it."""
    total = 0
    for tensor in tensors:
        local = local_part(tensor)
        key = id_tensor_storage(local)
        if key not in counted and not local.is_meta:
            counted.add(key)
            total += key[2]
    return total


def _gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    # While nothing is exchanged, whole gradients lie beside the parameters.
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in state()._fsdp_param_groups if state is not None else ():
            for item in group.fsdp_params:
                whole = getattr(item, "_unsharded_param", None)
                yield from (
                    g for g in (item.unsharded_accumulated_grad, getattr(whole, "grad", None)) if g is not None
                )
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        yield from (g for g in (getattr(flat, name, None) for name in ("grad", "_saved_grad_shard")) if g is not None)


def _peak(device: torch.device, counted: set[Any]) -> tuple[int, int | None, str]:
    """Return the peak of allocations, how much of it is not counted above, and what the two mean."""
    allocated = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    if device.type != "cpu" and allocated is not None:
        peak = allocated(device)
        on_device = sum(key[2] for key in counted if key[0].type == device.type)
        return (
            peak,
            max(0, peak - on_device),
            (
                f"peak: most that torch had allocated since the start or torch.{device.type}.reset_peak_memory_stats(); "
                "activations: the part of it that is in no other column now, so buffers of communication are in it, and gradients "
                "that were freed."
            ),
        )
    return (
        _resident_peak(),
        None,
        "peak: most memory that the process had resident since its start, libraries included.",
    )


def _resident_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such count
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _Kept:
    """A tensor that autograd keeps; its end is the end of the graph's interest in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextlib.contextmanager
def measure_activations(accelerator: "Accelerator") -> Iterator[None]:
    """Measure what autograd keeps for backward at most, for ``memory_report``; on any device. Each rank for itself.

    It follows each tensor that forward saves, which costs time: run one step in it, not an epoch. Memory that several
    tensors share counts once, and parameters and buffers do not count.

    Args:
        accelerator: The peak is kept on it.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(4, 4))
        >>> with measure_activations(accelerator):
        ...     accelerator.backward(model(torch.ones(8, 4)).sum())
        >>> memory_report(accelerator).rows[0].activations
        128

    Source:
        https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
    """
    models = accelerator._models
    own = {id_tensor_storage(local_part(t)) for m in models for t in (*m.parameters(), *m.buffers())}
    users: dict[Any, int] = {}
    now = peak = 0

    def drop(key: Any) -> None:
        nonlocal now
        users[key] -= 1
        if not users[key]:
            del users[key]
            now -= key[2]

    def pack(tensor: torch.Tensor) -> _Kept:
        nonlocal now, peak
        kept, key = _Kept(tensor), id_tensor_storage(local_part(tensor))
        if key not in own:
            if key not in users:
                now += key[2]
                peak = max(peak, now)
            users[key] = users.get(key, 0) + 1
            weakref.finalize(kept, drop, key).atexit = False
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield
    accelerator._activations_peak = peak  # type: ignore[attr-defined]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested state, such as an optimizer's.

    Args:
        value: Any nesting of dictionaries, lists and tuples.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
