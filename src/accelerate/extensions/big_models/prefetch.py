"""Reading the weights of the next modules while this one computes.

A dispatched model with offloaded weights gets one `Prefetcher`, which all its hooks share. In a forward of the model
each hook that brings weights in announces itself; the order of the last forward says which hooks follow. A thread
reads their weights ahead of what the device computes, in that order and no further than a budget of bytes; where the model takes another way, what
is ahead is dropped. Nothing is ahead between two forwards, when weights may be changed, so results do not depend on
it.
"""

import contextlib
import functools
import logging
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from accelerate.base.environment import str_to_bool
from accelerate.base.text import convert_file_size_to_int
from accelerate.devices import table
from accelerate.extensions.big_models.placement import FOUR_BIT, INT8, exact_device
from accelerate.extensions.big_models.store import WeightSource
from accelerate.modules.offloaded import hooks_of, offloading_hook
from accelerate.runtime.durable import c_function

logger = logging.getLogger(__name__)

PREFETCH_VARIABLE = "ACCELERATE_OFFLOAD_PREFETCH"

# Where the CPU computes, at least this much may be ahead: mostly pages of files, which the kernel takes back when it needs them.
_AHEAD_ON_CPU = 256 * 2**20
# There, modules with fewer bytes than this are not worth a thread's while.
SMALLEST_ON_CPU = 64 * 1024
# Kernels from 5.14 know this advice.
_POPULATE = 22
# Size of each of the pinned buffers that weights travel through; two are enough to fill one while the other is sent.
STAGING_BYTES = 64 * 2**20

Tensors = dict[str, torch.Tensor]


def prefetch_budget(prefetch: bool | int | str | None) -> int | None:
    """Return how many bytes may be read ahead: 0 for none, None for the size of the largest module.

    `prefetch` is a bool, a number of bytes or text such as ``"2GiB"``; None: what ``ACCELERATE_OFFLOAD_PREFETCH``
    says, else True.
    """
    source = "prefetch"
    if prefetch is None:
        source, prefetch = PREFETCH_VARIABLE, os.environ.get(PREFETCH_VARIABLE, "").strip() or True
    if isinstance(prefetch, bool | str):
        with contextlib.suppress(ValueError):
            return None if str_to_bool(str(prefetch)) else 0
    try:
        return convert_file_size_to_int(int(prefetch) if str(prefetch).isdecimal() else prefetch)
    except ValueError as error:
        raise ValueError(
            f"{source}={prefetch!r} is no budget for reading ahead. Use true, false, a number of bytes or text such as '2GiB'."
        ) from error


def _read_pages(tensor: torch.Tensor) -> None:
    """Have the pages of a mapped tensor read and mapped in one go, which is several times faster than a fault at a time."""
    if tensor.nbytes and tensor.is_contiguous() and not _populated(tensor.data_ptr(), tensor.nbytes):
        tensor.detach().view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()  # a byte of each page


def _populated(address: int, length: int) -> bool:
    """Advise the kernel to read and map pages; return whether it does. Source: https://man7.org/linux/man-pages/man2/madvise.2.html"""
    if sys.platform != "linux":
        return False
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    # ctypes lets other threads run meanwhile; mmap.madvise does not.
    return c_function("madvise", "void_p", "size_t", "int")(begin, address + length - begin, _POPULATE) == 0


class HostTransfer:
    """For weights that compute on the CPU: the pages of their files are read, and what has another dtype is cast."""

    def bring(self, weights: dict[str, tuple[torch.Tensor, torch.dtype]]) -> tuple[Tensors, None]:
        """Read the weights, each with the dtype that it has to have. Runs in the prefetching thread."""
        for tensor, _ in weights.values():
            _read_pages(tensor)
        return {name: tensor.to(dtype) for name, (tensor, dtype) in weights.items()}, None

    def mark(self) -> None:
        """Return nothing to wait for: this device is never behind the host."""

    def receive(self, tensors: Tensors, event: None) -> Tensors:
        """Return the weights to the module that runs now."""
        return tensors


class StreamTransfer:
    """For weights that compute on an accelerator: cast into two pinned buffers, and sent on a separate stream.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
    """

    def __init__(self, device: torch.device, namespace: ModuleType, staging_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        self.namespace = namespace
        self._staging_bytes = staging_bytes
        self._stream: Any = None
        self._buffers: list[tuple[torch.Tensor, Any]] = []  # with an event each: what was in it is on the device

    def bring(self, weights: dict[str, tuple[torch.Tensor, torch.dtype]]) -> tuple[Tensors, Any]:
        """Send the weights; the copies may still be under way when this returns, before the event behind them."""
        if self._stream is None:
            self._stream = self.namespace.Stream(device=self.device)
            for _ in range(2):
                buffer = torch.empty(self._staging_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                self._buffers.append((buffer, self.namespace.Event()))
        on_device = {name: self._send(tensor, dtype) for name, (tensor, dtype) in weights.items()}
        event = self.namespace.Event()
        event.record(self._stream)
        return on_device, event

    def mark(self) -> Any:
        """Return an event that comes when the device has computed all that it was given so far."""
        event = self.namespace.Event()
        event.record(self.namespace.current_stream(self.device))
        return event

    def receive(self, tensors: Tensors, event: Any) -> Tensors:
        """Return the weights; what their device's current stream computes from here on waits for their copies."""
        stream = self.namespace.current_stream(self.device)  # another device may be current
        stream.wait_event(event)
        for tensor in tensors.values():
            # The memory belongs to the copying stream, which must not hand it out again before this one is done.
            tensor.record_stream(stream)
        return tensors

    def _send(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        tensor = tensor.detach()
        with torch.no_grad(), self.namespace.stream(self._stream):
            if not tensor.is_contiguous():
                return tensor.to(self.device, dtype)  # keeps the strides, on which the bits of results may depend
            flat, step = tensor.reshape(-1), self._staging_bytes // dtype.itemsize
            on_device = torch.empty(flat.shape, dtype=dtype, device=self.device)
            for source, target in zip(flat.split(step), on_device.split(step), strict=True):
                self._buffers.reverse()
                buffer, sent = self._buffers[0]  # the one that was sent longest ago
                sent.synchronize()
                staged = buffer[: source.numel() * dtype.itemsize].view(dtype)
                staged.copy_(source)  # reads the file and casts, while the part before is on its way
                target.copy_(staged, non_blocking=True)
                sent.record(self._stream)
        return on_device.reshape(tensor.shape)


@dataclass(frozen=True)
class Unit:
    """The offloaded weights that one hook brings in at once, with the dtypes that they must have by name."""

    hook: Any
    transfer: HostTransfer | StreamTransfer
    dtypes: dict[str, torch.dtype]
    nbytes: int

    def bring(self, after: Any) -> tuple[Tensors, Any]:
        """Read the weights, `after` an event if there is one. Runs in the prefetching thread."""
        if after is not None:
            after.synchronize()
        source = WeightSource(self.hook.weights_map)
        return self.transfer.bring({name: (source.get(name), dtype) for name, dtype in self.dtypes.items()})


class Prefetcher:
    """Learns in which order hooks bring in weights, and reads up to `budget` bytes ahead of what computes."""

    def __init__(self, units: list[Unit], budget: int) -> None:
        self.budget = budget
        self._units = {id(unit.hook): unit for unit in units}
        self._order: list[Unit] = []  # of the last forward
        self._now: list[Unit] | None = None  # of this one; None between forwards
        self._next = 0  # what is expected next in that order
        self._ahead: deque[tuple[Unit, Future]] = deque()  # what was requested: from there on
        self._bytes_ahead = 0
        self._lock = threading.Lock()
        self._reader: ThreadPoolExecutor | None = None  # the thread, which ends when this object goes
        self._process = 0  # that has the thread; a forked one does not

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a copied model has other hooks

    def begin(self) -> None:
        """Note that a forward of the whole model begins, and have its first modules read."""
        with self._lock:
            self._drop()
            self._now, self._next = [], 0
            self._extend()

    def end(self) -> None:
        """Note that a forward of the whole model ended, and drop what is ahead: weights may be changed before the next."""
        with self._lock:
            self._drop()
            if self._now is not None:
                self._order, self._now = self._now, None

    def enter(self, hook: Any) -> Tensors:
        """Note that a hook's module runs; return its weights there, or nothing if the hook brings them itself."""
        unit = self._units.get(id(hook))
        if unit is None or self._now is None:
            return {}
        with self._lock:
            self._now.append(unit)
            found = None
            if self._ahead and self._ahead[0][0] is unit:
                found = self._ahead.popleft()[1]
                self._bytes_ahead -= unit.nbytes
            else:
                self._drop()
                self._find(unit)
            self._next += 1
            # The host may be far ahead of the device: there is room when that gets to this unit.
            self._extend(after=unit.transfer.mark())
        return self._received(unit, found) if found is not None else {}

    def close(self) -> None:
        """End the thread; the prefetcher starts a new one if it is used again."""
        with self._lock:
            self._drop()
            if self._reader is not None:
                self._reader.shutdown(wait=False)
            self._reader = None

    def _find(self, unit: Unit) -> None:
        """Set what is expected now to where a unit comes next in the known order; to its end if it does not."""
        end = len(self._order)
        positions = (*range(self._next, end), *range(min(self._next, end)))
        self._next = next((position for position in positions if self._order[position] is unit), end)

    def _extend(self, after: Any = None) -> None:
        """Ask for the modules that follow, as far as the budget goes; their weights are read after an event."""
        position = self._next + len(self._ahead)
        while position < len(self._order) and self._bytes_ahead + self._order[position].nbytes <= self.budget:
            self._ask(self._order[position], after)
            position += 1

    def _ask(self, unit: Unit, after: Any) -> None:
        try:
            if self._reader is None or self._process != os.getpid():
                self._reader, self._process = ThreadPoolExecutor(1, "accelerate-prefetch"), os.getpid()
            future = self._reader.submit(unit.bring, after)
        except RuntimeError as error:  # the system has no thread left, or the interpreter is about to exit
            self._turn_off(f"Weights are read when they are needed, because no thread can read them ahead: {error}")
            return
        self._ahead.append((unit, future))
        self._bytes_ahead += unit.nbytes

    def _turn_off(self, reason: str) -> None:
        if self.budget >= 0:
            logger.warning(reason)
        self.budget = -1

    def _received(self, unit: Unit, found: Future[tuple[Tensors, Any]]) -> Tensors:
        try:
            return unit.transfer.receive(*found.result())
        except torch.OutOfMemoryError:
            self._turn_off(
                "Reading weights ahead ran out of memory and is off from now on; they are read when they are needed. Give a "
                "smaller `prefetch` budget."
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # panics of Rust are no `Exception`
            # The hook reads again itself, and raises there, where the user can see it.
            logger.debug("Reading ahead failed: %s", error)
        return {}

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.popleft()[1].cancel()
        self._bytes_ahead = 0


def attach_prefetcher(model: nn.Module, prefetch: bool | int | str | None) -> Prefetcher | None:
    """Have a dispatched model's hooks read weights ahead and return their prefetcher; None where nothing is gained."""
    budget, leading = prefetch_budget(prefetch), aligning_hook(model)
    transfer_to = functools.cache(_transfer)
    found = (_unit(module, transfer_to) for module in model.modules() if budget != 0)
    units = [unit for unit in found if unit is not None]
    if not units or leading is None:
        return None
    if budget is None:
        on_cpu = all(isinstance(unit.transfer, HostTransfer) for unit in units)
        budget = max(_AHEAD_ON_CPU if on_cpu else 0, *(unit.nbytes for unit in units))
    prefetcher = Prefetcher(units, budget)
    for unit in units:
        unit.hook.prefetcher = prefetcher
    leading.leads = prefetcher
    return prefetcher


def aligning_hook(module: nn.Module) -> Any | None:
    """Return the module's hook, or the one among several, that aligns devices; None if it has none."""
    return next((hook for hook in hooks_of(module) if hasattr(hook, "io_same_device")), None)


def _unit(module: nn.Module, transfer_to: Callable[[torch.device], Any]) -> Unit | None:
    """What a module's hook brings in, if reading it ahead is of use: not what is in memory already, nor what is quantised."""
    hook = offloading_hook(module)
    if hook is None or hook.weights_map is None or hook.execution_device is None:
        return None
    device = exact_device(hook.execution_device)
    offloaded = dict(hook.offloaded_tensors(module))
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in offloaded.values())
    quantized = any(type(tensor).__name__ in (INT8, *FOUR_BIT) for tensor in offloaded.values())
    if device.type == "meta" or quantized or not nbytes:
        return None
    source = WeightSource(hook.weights_map)
    if device.type == "cpu" and (nbytes < SMALLEST_ON_CPU or not any(map(source.in_file, offloaded))):
        return None
    transfer = transfer_to(device)
    return transfer and Unit(hook, transfer, {name: tensor.dtype for name, tensor in offloaded.items()}, nbytes)


def _transfer(device: torch.device) -> HostTransfer | StreamTransfer | None:
    """The way to a device; None for accelerators without streams."""
    if device.type == "cpu":
        return HostTransfer()
    namespace = table.row(device.type).namespace()
    return StreamTransfer(device, namespace) if hasattr(namespace, "Stream") and hasattr(namespace, "Event") else None
