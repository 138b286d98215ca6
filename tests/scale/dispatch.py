"""Dispatched streams: bytes that a rank receives and milliseconds a batch, as ranks are added.

    python tests/scale/dispatch.py                   # 2 and 4 gloo processes, then the reader of 1,024 ranks
    python tests/scale/dispatch.py --ranks 2 --sample 65536

Bytes are those of the kernel's TCP counters for this process's own connections, so nothing of the package is patched. The
reader of 1,024 ranks runs alone on torch's fake process group: what it needs for a batch without the network.
"""

import argparse
import json
import os
import socket
import statistics
import struct
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

BATCH, STEPS = 32, 12
_RECEIVED = 128  # where tcp_info holds the bytes received


class Pictures(IterableDataset):
    """`length` samples of `size` bytes, cheap to read."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.one = length, torch.ones(size, dtype=torch.uint8)

    def __iter__(self):
        return ({"picture": self.one, "label": number} for number in range(self.length))


def received() -> int:
    """Bytes that the open TCP connections of this process have received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(info) >= _RECEIVED + 8:
            total += struct.unpack_from("Q", info, _RECEIVED)[0]
    return total


def rank(size: int, compute_ms: float) -> None:
    """One of the processes: iterate a dispatched stream; rank 0 prints the figures of all."""
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    world = accelerator.num_processes
    loader = accelerator.prepare(DataLoader(Pictures(BATCH * world * STEPS, size), batch_size=BATCH))
    sum(1 for _ in loader)
    accelerator.wait_for_everyone()
    before, times, last = received(), [], time.perf_counter()
    for batch in loader:
        assert batch["picture"].shape == (BATCH, size)
        now = time.perf_counter()
        times.append(now - last)
        if compute_ms:
            time.sleep(compute_ms / 1e3)  # a step on a device: the host waits
        last = time.perf_counter()
    found = gather_object([((received() - before) / STEPS, 1e3 * statistics.median(times[1:]))])
    if accelerator.is_main_process:
        others = found[1:] or found
        figures = {
            "ranks": world,
            "KiB received a batch, largest of a rank": round(max(bytes_ for bytes_, _ in others) / 1024, 1),
            "ms waited for a batch, rank 0": round(found[0][1], 2),
            "ms waited for a batch, median of the others": round(statistics.median(ms for _, ms in others), 2),
        }
        print(json.dumps(figures), flush=True)
    accelerator.wait_for_everyone()
    os._exit(0)


def alone(world: int, size: int) -> None:
    """The reader of `world` ranks, on a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from accelerate import Accelerator, comm

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm.side_group = lambda beside=False: dist.group.WORLD  # gloo cannot meet ranks that are not there
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Pictures(BATCH * world * 6, size), batch_size=BATCH))
    times, last = [], time.perf_counter()
    for _ in loader:
        times.append(time.perf_counter() - last)
        last = time.perf_counter()
    figures = {
        "ranks": world,
        "sample bytes": size,
        "ms of the reader a batch": round(1e3 * statistics.median(times), 1),
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)


def launch(world: int, arguments: list[str]) -> None:
    """Start the ranks and wait for them; a failure of one is the program's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pids = []
    for number in range(world):
        pid = os.fork()
        if not pid:
            os.environ.update(
                {name: str(value) for name, value in (common | {"RANK": number, "LOCAL_RANK": number}).items()}
            )
            os.execv(sys.executable, [sys.executable, __file__, "--rank", *arguments])
        pids.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(ended):
        sys.exit("a rank failed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--sample", type=int, default=600 << 10)
    parser.add_argument("--compute-ms", type=float, default=0)
    parser.add_argument("--alone", type=int, default=0)
    parser.add_argument("--rank", action="store_true")
    options = parser.parse_args()
    if options.rank:
        rank(options.sample, options.compute_ms)
    if options.alone:
        alone(options.alone, options.sample)
    for world in options.ranks:
        launch(world, ["--sample", str(options.sample), "--compute-ms", str(options.compute_ms)])
    os.execv(sys.executable, [sys.executable, __file__, "--alone", "1024", "--sample", "2048"])


if __name__ == "__main__":
    main()
