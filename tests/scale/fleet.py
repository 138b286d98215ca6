"""Many gloo ranks on one machine, and what they say to the key-value store: requests and bytes of each phase of a small run.

    python tests/scale/fleet.py RANKS [ddp|fsdp2]

Ranks are forks that reach the store through a counting proxy, so that nothing of the package is replaced. Prints a line of JSON:
by phase its seconds, and what a rank says on the average in KiB (both ways) and requests. The threads that look for hangs ask the
store at a steady rate whatever the program does; the phase "idle" measures that rate, and it is taken off the other phases.
"""

import contextlib
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# The last but one saves once more.
PHASES = ("idle", "prepare", "three steps", "save", "second save", "load", "preemption", "hang report")
_LIMIT_S = float(os.environ.get("FLEET_LIMIT_S", 500))
_IDLE_S = 4.0
_OF_MODE = {"ddp": (), "fsdp2": ("torch.distributed.checkpoint", "torch.distributed.fsdp")}
_REPORT_AFTER_S = 2.0


# -- a rank ------------------------------------------------------------------------------------------------------------


def train(rank: int, ranks: int, folder: str, say: Callable[[str], None], released: int) -> None:
    """Go through the phases; all ranks begin one together."""
    import torch
    import torch.distributed as dist

    from accelerate import Accelerator
    from accelerate.extensions.preemption.watch import Preempted
    from accelerate.utils import ProjectConfiguration

    def phase(name: str) -> None:
        dist.barrier()
        if rank == 0:
            say(name)

    accelerator = Accelerator(project_config=ProjectConfiguration(folder, save_on_signal=["SIGUSR1"]))
    phase("idle")
    time.sleep(_IDLE_S)  # what is measured
    phase("prepare")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(ranks * 32, 64), batch_size=2, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    batches = iter(data)

    def step() -> None:
        accelerator.backward(model(next(batches)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    phase("three steps")
    for _ in range(3):
        step()
    phase("save")
    accelerator.save_state(f"{folder}/first")
    phase("second save")
    accelerator.save_state(f"{folder}/second")
    phase("load")
    accelerator.load_state(f"{folder}/second")
    phase("preemption")
    if rank == ranks // 2:
        os.kill(os.getpid(), signal.SIGUSR1)
    with contextlib.suppress(Preempted):
        for _ in range(20):  # epochs; far more than it takes
            batches = iter(data)
            with contextlib.suppress(StopIteration):
                while True:
                    step()
        raise AssertionError("no signal came through")
    phase("hang report")
    if rank == ranks - 1:
        os.read(released, 1)  # once the others have reported
    phase("end")


def _begin(rank: int, ranks: int, mode: str, port: int, folder: str, pipe: int, released: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(ACCELERATE_HANG_REPORT_AFTER=str(_REPORT_AFTER_S))
    if mode == "fsdp2":
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="NO_WRAP")
    os.dup2(pipe, 2)  # reports and warnings
    train(rank, ranks, folder, lambda name: os.write(pipe, f"PHASE {name}\n".encode()), released)


# -- the proxy ---------------------------------------------------------------------------------------------------------


class Proxy:
    """Passes bytes between ranks and a store, and counts them."""

    def __init__(self, port: int, target: int, watched: int) -> None:
        self.bytes = self.requests = 0
        self.lines: list[str] = []
        self._target, self._text = target, b""
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, "new")
        self._selector.register(watched, selectors.EVENT_READ, "pipe")

    def turn(self) -> None:
        """Pass on what there is, and keep the lines that ranks have written."""
        for key, _ in self._selector.select(0.2):
            if key.data == "new":
                ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))
                for end, other, is_rank in ((*ends, True), (*ends[::-1], False)):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._selector.register(end, selectors.EVENT_READ, (other, is_rank))
            elif key.data == "pipe":
                *lines, self._text = (self._text + os.read(key.fd, 1 << 16)).split(b"\n")
                self.lines += [line.decode(errors="replace") for line in lines]
            else:
                self._pass_on(key.fileobj, *key.data)

    def _pass_on(self, end: socket.socket, other: socket.socket, is_rank: bool) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = end.recv(1 << 20)
        self.bytes += len(data)
        self.requests += is_rank and bool(data)
        try:
            if not data:
                raise OSError
            other.sendall(data)
        except OSError:
            for one in (end, other):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()


# -- the whole ---------------------------------------------------------------------------------------------------------


def measure(ranks: int, mode: str = "ddp") -> dict[str, dict[str, float]]:
    """Run a fleet in forks of this process; RuntimeError with what a rank wrote if it does not come to its end."""
    os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", ACCELERATE_DISABLE_NUMA="true")
    for module in (
        "accelerate",
        "accelerate.checkpointing",
        "accelerate.extensions.preemption.watch",
        *_OF_MODE[mode],
    ):
        importlib.import_module(module)  # before the forks, which share it
    import torch

    from accelerate.runtime.rendezvous import serve_this_machine

    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # so is what this imports
    warnings.simplefilter("ignore")
    folder, (watched, pipe), (released, release) = tempfile.mkdtemp(prefix="fleet"), os.pipe(), os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        target, port = one.getsockname()[1], two.getsockname()[1]
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            try:
                _begin(rank, ranks, mode, port, folder, pipe, released)
                os._exit(0)
            except BaseException:
                os.write(pipe, f"FAILED rank {rank}: {traceback.format_exc()}\n".encode())
            finally:
                os._exit(1)
        children.append(child)
    store = serve_this_machine(target, timedelta(minutes=5))
    try:
        return _counted(ranks, Proxy(port, target, watched), release)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)
        del store


def _counted(ranks: int, proxy: Proxy, release: int) -> dict[str, dict[str, float]]:
    found: dict[str, Any] = {}
    phase, before, deadline = None, (time.monotonic(), 0, 0), time.monotonic() + _LIMIT_S
    while phase != "end":
        proxy.turn()
        lines, proxy.lines = proxy.lines, []
        for line in lines:
            if line.startswith("FAILED") or time.monotonic() > deadline:
                raise RuntimeError(f"{ranks} ranks, in {phase}: {line} {' '.join(lines)}")
            if phase == "hang report" and f"rank {ranks - 1} " in line:
                os.write(release, b"!")
            if line.startswith("PHASE "):
                now = (time.monotonic(), proxy.bytes, proxy.requests)
                if phase is not None:
                    found[phase] = [end - start for end, start in zip(now, before, strict=True)]
                phase, before = line.removeprefix("PHASE "), now
        if time.monotonic() > deadline:
            raise RuntimeError(f"{ranks} ranks did not come out of {phase!r} within {_LIMIT_S:.0f} s")
    seconds, *rates = found["idle"]
    for name, (took, *counts) in found.items():
        steady = [0.0 if name == "idle" else rate * took / seconds for rate in rates]
        size, requests = (max(0.0, count - usual) / ranks for count, usual in zip(counts, steady, strict=True))
        found[name] = {"seconds": round(took, 2), "KiB": round(size / 1024, 2), "requests": round(requests, 1)}
    return found


if __name__ == "__main__":
    print(json.dumps({"ranks": int(sys.argv[1]), **measure(int(sys.argv[1]), *sys.argv[2:])}))
