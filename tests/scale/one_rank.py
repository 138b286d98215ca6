"""One rank of many on torch's fake process group: what `prepare`, steps, a save and a load take it, in seconds and memory.

    python tests/scale/one_rank.py RANKS

It is rank 0, the leader, which has the most to do. Other ranks are made up: they come to each round before it, have
the same tensors, and have written their own files and parts of the manifest. Prints a line of JSON.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = int(sys.argv[1])
os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
os.environ.update(FSDP_AUTO_WRAP_POLICY="NO_WRAP", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
os.environ.update(RANK="0", WORLD_SIZE=str(RANKS), LOCAL_RANK="0", LOCAL_WORLD_SIZE="8")

import torch  # noqa: E402  these read the environment
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401  it registers the backend

from accelerate import Accelerator  # noqa: E402
from accelerate.checkpoint.manifest import FileEntry, random_states_file, write_part  # noqa: E402
from accelerate.checkpoint.ranks import _FLAG as FLAG  # noqa: E402
from accelerate.extensions.simulate import simulated  # noqa: E402
from accelerate.runtime.durable import Checksum  # noqa: E402


class OthersCame(simulated.OthersCame):
    """A store in which all other ranks have come to each round before this one, and which counts requests."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        self.requests = 0
        # After so many rounds, one in which all other ranks raise their flag: they have written files.
        self.written_after = -1

    def others(self, key: str) -> int:
        """Return what the others have added to a counter since this rank last did."""
        if not key.endswith("come"):
            return RANKS - 1
        self.written_after -= 1
        return (RANKS - 1) * (1 + FLAG * (self.written_after == -1))


def _counted(name: str) -> None:
    plain = getattr(simulated.OthersCame, name)

    def count(self: OthersCame, *arguments: Any) -> Any:
        self.requests += 1
        return plain(self, *arguments)

    setattr(OthersCame, name, count)


for _name in ("add", "set", "get", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set", "append"):
    _counted(_name)


def of_others(folder: str) -> None:
    """Write what the other ranks write: a small file, and the part of the manifest that lists it."""
    content = bytes(8 << 10)
    checksum = Checksum()
    checksum.update(content)
    for rank in range(1, RANKS):
        name = random_states_file(rank)
        Path(folder, name).write_bytes(content)
        write_part(folder, rank, {name: FileEntry.made(len(content), checksum.digests(), rank)})


def main() -> None:
    """Go through the phases."""
    store, seconds = OthersCame(), {}
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=store)
    accelerator = Accelerator()
    began = time.perf_counter()

    def timed(name: str, without: float = 0.0) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds[f"{name} (s)"] = round(now - began - without, 3)
        began = time.perf_counter()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(RANKS * 32, 512), batch_size=4, shuffle=True)
    began = time.perf_counter()
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    timed("prepare")
    for number, batch in enumerate(data, 1):
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 5:
            break
    timed("five steps")
    others = 0.0

    def hook(models: list[Any], states: list[Any], folder: str) -> None:
        nonlocal others
        start = time.perf_counter()
        of_others(folder)
        store.written_after = 2
        others = time.perf_counter() - start

    accelerator.register_save_state_pre_hook(hook)
    with tempfile.TemporaryDirectory() as scratch:
        folder, before = Path(scratch, "checkpoint"), store.requests
        began = time.perf_counter()
        accelerator.save_state(folder)
        timed("save", without=others)
        saved, manifest = store.requests - before, (folder / "accelerate_manifest.json").stat().st_size
        accelerator.load_state(folder)
        timed("load")
        loaded = store.requests - before - saved
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    found = {"ranks": RANKS, **seconds, "requests of a save": saved, "requests of a load": loaded}
    print(json.dumps({**found, "manifest (KiB)": manifest >> 10, "peak (MiB)": peak}))


main()
