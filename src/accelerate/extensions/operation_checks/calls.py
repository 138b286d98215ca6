"""Check that all ranks call the same operation, on the same structure, shapes and dtypes.

torch's collectives do not check sizes: unequal ones hang, abort, return garbage or pass unnoticed. Two checks find them:

1. Repeated calls are expected. The last calls of all ranks are the same list on each of them, so all expect the same next
   call. Every rank carries it out, with a flag next to the data. A rank with another call sends zeros and raises the flag.
   So a loop needs one collective per call.
2. Any other call is compared first, by one all-reduce of a checksum and its complement. Only if they differ, the ranks
   exchange their calls, and all raise.

On devices other than the CPU the flags of an expected call are copied in the background, and read before the next
operation. A second flag says whether any rank made the expected call. A rank that did not raises at once, because the others
have continued. Debug mode compares before each call, on all devices.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from accelerate.base.nested import filled, outline
from accelerate.base.text import LISTED, listed
from accelerate.comm.base import Communicator, DistributedOperationException, checksum
from accelerate.runtime import storage

PACKED = 256 << 10  # bytes: above this, packing takes longer than a separate collective, and no call is expected
_REMEMBERED = 16  # calls
_TEXT = 512  # characters of a call's description
OBJECTS = "gather_object"


def disagreement(calls: Sequence[tuple[str, str]]) -> DistributedOperationException:
    """Return the error for ranks that disagree; `calls` has each rank's operation and a description of its arguments."""
    names = list(dict.fromkeys(_full_name(operation) for operation, _ in calls))
    passed = [words if len(names) == 1 else f"`{operation}` of {words}" for operation, words in calls]
    common = max(set(passed), key=lambda text: (passed.count(text), -passed.index(text)))
    different = [rank for rank, text in enumerate(passed) if text != common]
    shown = sorted([passed.index(common), *different[:LISTED]])
    lines = "\n".join(f"  - Process {rank}: {passed[rank]}" for rank in shown)
    return DistributedOperationException(
        f"The processes disagree about a distributed operation: process(es) {listed(different)} differ from the others. "
        "All must pass the same structure, shapes and dtypes; `accelerator.pad_across_processes` makes shapes equal.\n\n"
        f"Operation: `{'`, `'.join(names)}`\nInput shapes:\n{lines}"
    )


def _full_name(operation: str) -> str:
    return operation if "." in operation else f"accelerate.utils.operations.{operation}"


class Call(NamedTuple):
    """A rank's call: equal on all ranks, or an error."""

    operation: str
    argument: str | int | None  # a reduction, a source of a broadcast, or None for a gather
    structure: str  # an outline
    device: str  # kind of device over which the tensors travel
    tensors: tuple[tuple[torch.dtype, torch.Size], ...]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors)

    def in_words(self) -> str:
        """Return a description of the arguments, or a checksum if it is too long for a message."""
        tensors = [f"{dtype}[{', '.join(map(str, shape))}]".removeprefix("torch.") for dtype, shape in self.tensors]
        text = filled(self.structure, tensors) + ("" if self.argument is None else f", {self.argument!r}")
        if len(text) > _TEXT:
            text = f"{text[:_TEXT]} ... and more ({len(tensors)} tensors, checksum {checksum(self):x})"
        return text


class CallChecker:
    """Tracks which call all ranks expect next, and whether they made it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # The same on all ranks: only calls of all ranks enter, and a disagreement that is noticed late empties it.
        self._calls: deque[Call] = deque(maxlen=_REMEMBERED)
        self._unread: tuple[Any, torch.Tensor, Call] | None = None

    def expected(self) -> Call | None:
        """Return the call that followed when the last one was made before, if it is small enough to be carried out at once."""
        self.flush()
        for place in range(len(self._calls) - 2, -1, -1):
            if self._calls[place] == self._calls[-1]:
                following = self._calls[place + 1]
                return following if following.tensors and following.size <= PACKED else None
        return None

    def remember(self, call: Call) -> None:
        """Remember a call that all ranks made."""
        self._calls.append(call)

    def is_valid(self, call: Call, expected: Call, flags: torch.Tensor) -> bool:
        """Return whether all ranks made the expected call. Of the `flags`, the first shows whether any rank did not, the second whether any did."""
        follows = call == expected
        module = getattr(torch, flags.device.type)
        # Objects are read at once; ranks whose objects have grown are no error.
        if not hasattr(module, "Event") or flags.is_cpu or expected.operation == OBJECTS:
            return follows and not flags[0]
        if follows:
            copy, event = flags.to("cpu", non_blocking=True), module.Event()
            event.record()
            self._unread = event, copy, call
        elif flags[1]:  # the others continue, and learn of it before their next operation
            raise self._late(
                f"process {self.rank} called `{call.operation}` of {call.in_words()}, and others called", expected
            )
        return follows

    def flush(self) -> None:
        """Raise if the ranks disagreed in the last call, if the check was deferred."""
        if self._unread is not None:
            (event, flags, call), self._unread = self._unread, None
            event.synchronize()
            if flags[0]:
                raise self._late(f"not all processes called what process {self.rank} did", call)

    def _late(self, what: str, call: Call) -> DistributedOperationException:
        self._calls.clear()
        return DistributedOperationException(
            f"The processes disagree about a distributed operation: {what} `{_full_name(call.operation)}` of {call.in_words()}. "
            "All must pass the same structure, shapes and dtypes; ACCELERATE_DEBUG_MODE=1 compares before each."
        )


def require_same(communicator: Communicator, call: Call) -> None:
    """Compare a call on all ranks, which raise a DistributedOperationException together.

    Collective: call on every rank.
    """
    if not communicator.is_same(call):
        raise disagreement(communicator.gather_object((call.operation, call.in_words())))


def compare_arguments(communicator: Communicator, operation: str, data: Any) -> None:
    """Compare the arguments of a collective between the ranks, in debug mode.

    Collective: call on every rank.
    """
    tensors: list[torch.Tensor] = []
    structure, pads = outline(data, tensors), operation.endswith(".pad_across_processes")
    kinds = ", ".join(sorted({item.device.type for item in tensors}))
    # Padding makes sizes equal, but not their number.
    shapes = [(item.dtype, "?" * item.ndim if pads or item.is_nested else item.shape) for item in tensors]
    require_same(communicator, Call(operation, None, f"{structure} on {kinds}", kinds, tuple(shapes)))
    device = storage.process.current.get("device")
    if device is not None and tensors and kinds != device.type:
        raise DistributedOperationException(
            f"`{operation}` was given tensors on {kinds}, and the device type of this run is {device.type!r}. Move "
            "them there first, with `tensor.to(accelerator.device)`."
        )
