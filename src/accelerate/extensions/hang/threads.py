"""The position of a thread of this process, the exchange it waits in, and whether other local processes exist."""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from accelerate.extensions.hang.torch_private import flight_recorders, module_called, workers_awaited
from accelerate.runtime.call_site import is_users, line_of

# Modules in which a thread waits for other ranks. Backward passes count, because gradients are exchanged in them.
WAITING_IN = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "accelerate.comm")
# States of a process, as Linux writes them.
_STATES = {"S": "asleep", "R": "running", "D": "at the disk", "T": "stopped by a signal", "t": "stopped by a debugger"}
BACKWARD = "the backward pass"
_DEEPEST = 8  # lines of a stack in a report


# -- the training thread of this process ---------------------------------------------------------------------------


def position(frame: FrameType) -> str:
    """Return what changes whenever a thread moves."""
    steps = [(id(outer), outer.f_lasti) for outer in _outward(frame)]
    return f"{zlib.crc32(repr(steps).encode()):x}-{len(steps)}"


def sleeps(native: int | None) -> bool:
    """Whether a thread of this process does not run; where that cannot be seen, it is taken to sleep."""
    try:
        stat = Path(f"/proc/self/task/{native}/stat").read_bytes()
    except OSError:
        return True
    return stat.startswith((b"S", b"D"), stat.rfind(b")") + 2)


# -- processes -----------------------------------------------------------------------------------------------------


def process() -> dict[str, Any]:
    """Describe this process so that others on the machine can look whether it exists."""
    return {"pid": os.getpid(), "machine": _machine(), "started": status(os.getpid())[1]}


def _machine() -> str:
    """Return a name that two processes share if they see each other's numbers; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def status(pid: int) -> tuple[str, str]:
    """Return the state of a process and when it was started; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "", ""
    words = stat[stat.rfind(b")") + 2 :].decode().split()
    return words[0], words[19]


def state(pid: int) -> str:
    """Return a process's state in words."""
    return _STATES.get(status(pid)[0], "gone")


def exists(process: dict[str, Any]) -> bool | None:
    """Return whether a process that `process` described exists; None where that cannot be seen from here."""
    if not process.get("machine") or process["machine"] != _machine():
        return None
    state, started = status(process["pid"])
    return state not in ("", "Z", "X") and started == process["started"]


# -- the exchange it waits in ----------------------------------------------------------------------------------------


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack(frame: FrameType) -> list[str]:
    """Return the user's lines of a stack, the innermost first."""
    return [line_of(outer) for outer in _outward(frame) if is_users(outer.f_code.co_filename)][:_DEEPEST]


def waits_in(frame: FrameType) -> dict[str, Any]:
    """Return the `operation`, `number` and `shapes` of the exchange that is not done here; empty if there is none."""
    in_flight = _in_flight()
    if in_flight:
        return in_flight
    called = _called_in_torch(frame)
    # Without a recorder, a backward pass that does not move counts as one that exchanges gradients.
    return {"operation": called} if called and (in_flight == {} or called != BACKWARD) else {}


def _called_in_torch(frame: FrameType) -> str:
    """Return the innermost function below the user's lines in which one waits for other ranks; empty if there is none."""
    for outer in _outward(frame):
        if is_users(outer.f_code.co_filename):
            return ""
        module = outer.f_globals.get("__name__", "")
        if module.startswith(WAITING_IN) and outer.f_code.co_name != "wrapper":
            return BACKWARD if module.startswith("torch.autograd") else outer.f_code.co_name
    return ""


def module(frame: FrameType) -> str:
    """Return the name of the innermost part of a model that a thread calls, or whose weights it gathers; empty if there is none."""
    called = [part for outer in _outward(frame) if (part := module_called(outer)) is not None]
    outermost = next((part for part in reversed(called) if isinstance(part, torch.nn.Module)), None)
    try:
        names = {id(part): name for name, part in outermost.named_modules()} if outermost is not None else {}
    except RuntimeError:  # a running thread may change the model at the same time
        names = {}
    return next(filter(None, (part if isinstance(part, str) else names.get(id(part)) for part in called)), "")


def loader_workers(frame: FrameType) -> str:
    """Say how the worker processes are that a thread waits for in a loader; empty if it waits for none."""
    for outer in _outward(frame):
        if workers := workers_awaited(outer):
            states = (f"pid {worker.pid} ({state(worker.pid)})" for worker in workers)
            return f"waits for its loader's workers: {', '.join(states)}"
    return ""


def _in_flight() -> dict[str, Any] | None:
    """Return the oldest unfinished operation that this rank has started, None if all are done, {} if that is unknown.

    torch's flight recorders know it, one for NCCL and one for the others. Torch 2.13 enables them for gloo and NCCL by default
    (TORCH_FR_BUFFER_SIZE; formerly TORCH_NCCL_TRACE_BUFFER_SIZE). Writing out a full recorder takes 60 ms, so it is only read
    if needed.
    """
    recorders = [json.loads(dump(True, True)).get("entries") or [] for dump in flight_recorders()]
    return next(filter(None, map(oldest_open, recorders)), None) if any(recorders) else {}


def oldest_open(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the name, number and shapes of a flight recorder's oldest entry that is not done."""
    # Gloo leaves the state at "scheduled" and retires finished operations; NCCL's watchdog retires them late.
    pending = [entry for entry in entries if not entry.get("retired") and entry.get("state") != "completed"]
    if not pending:
        return None
    entry = min(pending, key=lambda entry: entry.get("record_id", 0))
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    kinds = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    shapes = ", ".join(f"{kind} {list(sizes)}" for kind, sizes in kinds)
    return {"operation": entry.get("profiling_name", "?").partition(":")[2], "number": number, "shapes": shapes}
