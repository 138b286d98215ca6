"""Reading the weights of the next modules while this one computes.

A dispatched model with offloaded weights gets one `Prefetcher`, which all its hooks share. Each hook announces that its module
is about to run. From the announcements the prefetcher learns which module follows which two, so that a module called twice in a
forward, an encoder before a decoder, and a generation step each find their successor. A thread then reads ahead, in that order,
and no further than a budget of bytes; what was guessed wrong is dropped. What is read ahead is used as it is or not at all, so
results do not depend on it.

What reading means is a `Lane`: pages of mapped files are made present (`PageLane`), weights are cast (`HostLane`), or copied to
an accelerator through pinned buffers on a stream of their own (`StreamLane`).
"""

import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.devices import probe
from accelerate.offload.alignment import exact_device
from accelerate.offload.disk import stored_at
from accelerate.offload.lanes import HostLane, Lane, PageLane, Ready, StreamLane
from accelerate.offload.placement import _QUANTIZED_PARAMETERS, _offloading_hook
from accelerate.offload.sizes import convert_file_size_to_int
from accelerate.utils.environment import str_to_bool

logger = logging.getLogger(__name__)

PREFETCH_VARIABLE = "ACCELERATE_OFFLOAD_PREFETCH"

# Where nothing but pages is read, which the kernel takes back when it needs them, at least this much may be ahead.
_PAGES_AHEAD = 256 * 2**20

# Stands in the learned order for the end of the model's forward.
_END = 0


def prefetch_budget(prefetch: bool | int | str | None) -> int | None:
    """Return how many bytes may be read ahead; 0 for none, None for the size of the largest module.

    Args:
        prefetch: True or False, a number of bytes, text such as ``"2GiB"``; None: what ``ACCELERATE_OFFLOAD_PREFETCH`` says
            in the same words, else True.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> prefetch_budget("1MiB"), prefetch_budget(False)
        (1048576, 0)
    """
    source = f"prefetch={prefetch!r}"
    if prefetch is None:
        prefetch = os.environ.get(PREFETCH_VARIABLE, "").strip() or True
        source = f"{PREFETCH_VARIABLE}={prefetch!r}"
    if isinstance(prefetch, bool):
        return None if prefetch else 0
    if isinstance(prefetch, str):
        try:
            return None if str_to_bool(prefetch) else 0
        except ValueError:
            prefetch = int(prefetch) if prefetch.isdecimal() else prefetch
    try:
        return convert_file_size_to_int(prefetch)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{source} is no budget for reading ahead. Use true, false, a number of bytes or text such as '2GiB'."
        ) from error


@dataclass
class Unit:
    """The offloaded weights that one hook brings in at once.

    Attributes:
        owner: The hook.
        lane: How the weights are brought in.
        read: Returns the weights by name as they are stored, each with the dtype that it has to have.
        nbytes: What they take where they are needed.
    """

    owner: Any
    lane: Lane
    read: Callable[[], Mapping[str, tuple[torch.Tensor, torch.dtype]]]
    nbytes: int


@dataclass
class _Request:
    unit: Unit
    done: threading.Event | None  # set once it was served; None where there is nothing to wait for
    ready: Ready | None = None
    sources: dict[str, tuple[torch.Tensor, int, int]] = field(default_factory=dict)
    dropped: bool = False


def _stamp(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A tensor with what changes when somebody writes to it. The tensor itself, because another may get its address."""
    return tensor, tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


class Prefetcher:
    """Learns in which order hooks bring in weights, and reads ahead.

    Args:
        units: What each hook brings in.
        budget: Bytes that may be ahead of the module that computes.

    Attributes:
        budget: As given.
        ahead: Bytes that are ahead now.
        most_ahead: The most that ever were.
        hits: How many modules found their weights read.
        misses: How many were not foreseen, or did not fit into the budget.
    """

    def __init__(self, units: Iterable[Unit], budget: int) -> None:
        self.budget = budget
        self.ahead = self.most_ahead = self.hits = self.misses = 0
        self._units = {id(unit.owner): unit for unit in units}
        self._after: dict[tuple[int, int], int] = {}
        self._after_one: dict[int, int] = {}
        self._last = self._last_but_one = _END
        self._asked: set[int] = set()
        self._requests: deque[_Request] = deque()
        self._jobs: queue.SimpleQueue[_Request | None] | None = None
        self._process = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copied model has other hooks; whoever copies it may ask for a prefetcher of its own.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())

    def enter(self, hook: Any) -> Ready | None:
        """Note that a hook's module runs now, have the next ones read, and return what was read for this one.

        Args:
            hook: The hook.

        Returns:
            Its weights on the execution device, or None where the hook has to bring them itself.
        """
        key = id(hook)
        foreseen = bool(self._requests) and id(self._requests[0].unit.owner) == key
        ready = self._take(key)
        if not foreseen and key in self._units:
            self._units[key].lane.unforeseen(self._units[key].read)
        self._note(key)
        self._extend()
        return ready

    def begin(self) -> None:
        """Note that a forward of the whole model begins, and have its first modules read."""
        self.drop()
        self._extend()

    def end(self) -> None:
        """Note that a forward of the whole model ended, and drop what is ahead: weights may be changed before the next."""
        self.drop()
        self._note(_END)

    def drop(self) -> None:
        """Let go of what is ahead."""
        while self._requests:
            request = self._requests.popleft()
            self.ahead -= request.unit.nbytes
            request.dropped, request.ready = True, None
        self._asked.clear()

    def close(self) -> None:
        """End the thread; the prefetcher starts a new one if it is used again."""
        self.drop()
        if self._jobs is not None and self._process == os.getpid():
            self._jobs.put(None)
        self._jobs = None

    def _note(self, key: int) -> None:
        before, last = self._last_but_one, self._last
        self._after[before, last] = self._after_one[last] = key
        self._last_but_one, self._last = last, key

    def _take(self, key: int) -> Ready | None:
        if not self._requests:
            return None
        request = self._requests[0]
        if id(request.unit.owner) != key:
            # The model took another way than last time: what was foreseen from here on is wrong.
            self.misses += 1
            self.drop()
            return None
        self._requests.popleft()
        self._asked.discard(key)
        self.ahead -= request.unit.nbytes
        self.hits += 1
        if request.done is None:
            return None
        if not request.done.is_set():
            if not request.unit.lane.worth_waiting:
                return None
            if self._process != os.getpid():
                self.drop()  # of the process that forked this one; nobody serves it here
                return None
            request.done.wait()
        if not request.unit.lane.delivers:
            return None
        return request.ready if self._is_current(request) else None

    def _is_current(self, request: _Request) -> bool:
        """Whether the weights are still those that were read: somebody may have written to them meanwhile."""
        if request.ready is None:
            return False
        try:
            found = request.unit.read()
        except (KeyError, OSError, RuntimeError, ValueError):
            return False  # the hook finds out, and says so
        for name, (tensor, _) in found.items():
            known, *before = request.sources.get(name, (None,))
            if tensor is not known or [*_stamp(tensor)[1:]] != before:
                return False
        return True

    def _extend(self) -> None:
        """Ask for the modules that follow, as far as the budget goes."""
        if self._requests:
            last = id(self._requests[-1].unit.owner)
            before = id(self._requests[-2].unit.owner) if len(self._requests) > 1 else self._last
        else:
            before, last = self._last_but_one, self._last
        while True:
            key = self._after.get((before, last), self._after_one.get(last, _END))
            unit = self._units.get(key)
            if unit is None or key in self._asked or self.ahead + unit.nbytes > self.budget:
                return
            self._ask(unit)
            before, last = last, key

    def _ask(self, unit: Unit) -> None:
        # A forked process has the queue, but not the thread.
        if (self._jobs is None or self._process != os.getpid()) and not self._start():
            return
        request = _Request(unit, None if unit.lane.off else threading.Event())
        self._requests.append(request)
        self._asked.add(id(unit.owner))
        self.ahead += unit.nbytes
        self.most_ahead = max(self.most_ahead, self.ahead)
        if not unit.lane.off:
            self._jobs.put(request)

    def _start(self) -> bool:
        jobs: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=_work, args=(jobs,), name="accelerate-prefetch", daemon=True).start()
        except RuntimeError as error:
            self.budget = -1
            logger.warning("Weights are not read ahead, because a thread for it cannot be started: %s", error)
            return False
        self._jobs, self._process = jobs, os.getpid()
        weakref.finalize(self, jobs.put, None)
        return True


def _nothing() -> None:
    return None


def _work(jobs: "queue.SimpleQueue[_Request | None]") -> None:
    """Serve requests until there is None. Holds no reference to the prefetcher, which ends the thread when it goes."""
    while (request := jobs.get()) is not None:
        lane = request.unit.lane
        try:
            if not request.dropped and not lane.off:
                _serve(request)
        except torch.OutOfMemoryError as error:
            lane.off = True
            logger.warning(
                "Reading weights ahead ran out of memory on %s and is off from now on; they are read when they are needed. "
                "Give a smaller `prefetch` budget. (%s)",
                lane.device,
                str(error).partition("\n")[0],
            )
        except BaseException as error:
            # The hook reads again itself, and raises there, where the user can see it. Panics of Rust are no `Exception`.
            logger.debug("Reading ahead failed: %s", error)
        finally:
            if request.done is not None:
                request.done.set()
            del request, lane


def _serve(request: _Request) -> None:
    weights = request.unit.read()
    # Before they are read, so that what is written to them meanwhile counts as a change.
    request.sources = {name: _stamp(tensor) for name, (tensor, _) in weights.items()}
    ready = request.unit.lane.bring(weights)
    if not request.dropped:
        request.ready = ready


def attach_prefetcher(model: nn.Module, prefetch: bool | int | str | None) -> Prefetcher | None:
    """Have a dispatched model's hooks read weights ahead; without anything to gain nothing happens.

    Args:
        model: A model whose offloading hooks are attached; the hook of the model itself says where a forward begins and ends.
        prefetch: As for `prefetch_budget`.

    Returns:
        The prefetcher that the hooks share, or None.
    """
    budget = prefetch_budget(prefetch)
    lanes: dict[tuple[torch.device, bool], Lane] = {}
    units = [] if budget == 0 else [unit for module in model.modules() if (unit := _unit(module, lanes)) is not None]
    if not units:
        return None
    if budget is None:
        pages = not any(unit.lane.delivers for unit in units)
        budget = max(_PAGES_AHEAD if pages else 0, *(unit.nbytes for unit in units))
    prefetcher = Prefetcher(units, budget)
    for unit in units:
        unit.owner.prefetcher = prefetcher
    leading = aligning_hook(model)
    if leading is not None:
        leading.leads = prefetcher
    return prefetcher


def aligning_hook(module: nn.Module) -> Any | None:
    """Return the hook (or the one among several) of a module that aligns devices; None if it has none.

    Args:
        module: Any module.
    """
    hook = module.__dict__.get("_hf_hook")
    return next((one for one in (hook, *getattr(hook, "hooks", ())) if hasattr(one, "io_same_device")), None)


def _unit(module: nn.Module, lanes: dict[tuple[torch.device, bool], Lane]) -> Unit | None:
    """What a module's hook brings in, if reading it ahead is of use: not what is in memory already, nor what is quantised."""
    hook = _offloading_hook(module)
    if hook is None or hook.weights_map is None or hook.execution_device is None:
        return None
    device = exact_device(hook.execution_device)
    if device.type == "meta":
        return None
    offloaded = hook.offloaded_tensors(module)
    if not offloaded or any(type(tensor).__name__ in _QUANTIZED_PARAMETERS for _, tensor in offloaded):
        return None
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize for _, tensor in offloaded)
    if device.type == "cpu" and nbytes < min(PageLane.smallest, HostLane.smallest):
        return None
    places = [(name, tensor.dtype, stored_at(hook.weights_map, name)) for name, tensor in offloaded]
    if any(place.cast not in (None, place.dtype, dtype) for _, dtype, place in places):
        return None  # cast twice on the way
    casts = any(place.dtype is not dtype for _, dtype, place in places)
    if _is_at_home(device, casts, any(place.in_file for _, _, place in places)):
        return None
    lane = _lane(device, casts, lanes)

    def read() -> dict[str, tuple[torch.Tensor, torch.dtype]]:
        return {name: (stored_at(hook.weights_map, name).tensor(), dtype) for name, dtype, _ in places}

    return Unit(hook, lane, read, nbytes) if lane is not None and nbytes >= lane.smallest else None


def _is_at_home(device: torch.device, casts: bool, in_file: bool) -> bool:
    """Whether weights are used where they are kept, so that there is nothing to wait for."""
    return device.type == "cpu" and not casts and not in_file


def _lane(device: torch.device, casts: bool, lanes: dict[tuple[torch.device, bool], Lane]) -> Lane | None:
    """The way to a device, made once; None for accelerators without streams."""
    casts = casts and device.type == "cpu"
    if (device, casts) in lanes:
        return lanes[device, casts]
    lane: Lane | None = None
    if device.type == "cpu":
        lane = HostLane() if casts else PageLane()
    else:
        namespace = probe.row(device.type).namespace()
        if hasattr(namespace, "Stream") and hasattr(namespace, "Event"):
            lane = StreamLane(device, namespace)
    lanes[device, casts] = lane
    return lane
