"""A checkpoint of 4 TiB on two ranks: listed, checked and loaded in part. Its large files are sparse shards, so that no disk has to hold them.

    python tests/scale/manifest.py [FILES]

Prints a line of JSON: bytes of the manifest and of a rank's part, and seconds.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator, notebook_launcher
from accelerate.checkpoint.manifest import NAME, FileEntry, Manifest, part_file, read_part, write_part
from accelerate.checkpoint.storage import storage_of
from accelerate.runtime.durable import CHUNK, Checksum

_RANKS, _FILE = 2, 64 << 30


def _zeros() -> bytes:
    checksum = Checksum()
    checksum.update(bytes(CHUNK))
    return checksum.digests()[0]


def _grow(folder: Path, rank: int, files: int) -> dict[str, FileEntry]:
    """Make a rank's large files, and return their entries."""
    entries = {}
    for number in range(rank, files, _RANKS):
        name = f"pytorch_model_fsdp_0/__{rank}_{number + 1}.distcp"
        with open(folder / name, "wb") as file:
            file.truncate(_FILE)
        entries[name] = FileEntry.made(_FILE, [_zeros()] * (_FILE // CHUNK), rank)
    return entries


def _list(folder: Path, rank: int, entries: dict[str, FileEntry], wait: Callable[[], None]) -> None:
    """Add the files to the manifest: those of rank 0 to its root, those of others to their parts. Collective: call on every rank."""
    listing = Manifest.read(folder)
    if rank:
        own = {name for name, entry in listing.files.items() if entry.rank == rank and name != part_file(rank)}
        write_part(folder, rank, {**listing.detailed(folder, own), **entries})
    wait()
    if rank == 0:
        files = {**listing.files, **entries}
        for other in range(1, _RANKS):
            written = Checksum()
            written.update((folder / part_file(other)).read_bytes())
            files[part_file(other)] = FileEntry.made(written.size, written.digests(), other)
            files |= {name: entry.brief() for name, entry in read_part(folder, other).items()}
        dataclasses.replace(listing, files=files).write(folder)
    wait()


def measure(folder: Path, files: int) -> None:
    """Save, add the large files, check and load. Collective: call on every rank."""
    import torch

    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="NO_WRAP")
    os.environ.update(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    rank, seconds = accelerator.process_index, {}
    model = torch.nn.Linear(512, 512)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 512)).sum())
    optimizer.step()

    def timed(name: str) -> None:
        accelerator.wait_for_everyone()
        seconds[name] = round(time.perf_counter() - timed.began, 2)
        timed.began = time.perf_counter()

    timed.began = time.perf_counter()
    accelerator.save_state(folder)
    timed("save of what is small (s)")
    _list(folder, rank, _grow(folder, rank, files), accelerator.wait_for_everyone)
    timed("write parts and manifest (s)")
    status = storage_of(folder).state()
    assert status.kind == "complete", status
    timed("check names and sizes (s)")
    own = [parameter.to_local() for parameter in model.parameters()]
    expected = [part.clone() for part in own]
    with torch.no_grad():
        torch._foreach_zero_(own)
    accelerator.load_state(folder)
    timed("load of what ranks need (s)")
    assert all(map(torch.equal, expected, own))
    if rank == 0:
        sizes = {"manifest (KiB)": folder / NAME, "part of a rank (KiB)": folder / part_file(1)}
        sizes = {name: os.path.getsize(path) >> 10 for name, path in sizes.items()}
        total = sum(entry.size for entry in status.manifest.files.values())
        print("RESULT", json.dumps({"TiB": round(total / (1 << 40), 2), **sizes, **seconds}), flush=True)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    with tempfile.TemporaryDirectory() as scratch:
        notebook_launcher(measure, (Path(scratch, "checkpoint"), count), num_processes=_RANKS, use_port="0")
