"""The folder of a launcher's copies in a RAM file system, and the exchange of copies between machines.

Torch's elastic launcher ends all ranks of a machine when one of them fails, so copies must outlive the ranks. Files of a RAM file system
are host memory that no process has to hold. The folder carries the launcher's process id. A guard process removes it when the launcher has
ended, however that happened::

    copies/SAVE    a copy of this machine's ranks, a checkpoint of `save_on_each_node`
    peer/SAVE      that of another machine
    */.partial-*   being written; never read
"""

import itertools
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import FileEntry, Manifest
from accelerate.checkpoint.storage import LocalStorage
from accelerate.runtime import durable
from accelerate.runtime.failure import LAUNCHER

# With this begins the name of a copy that is not complete.
PARTIAL = ".partial-"
logger = logging.getLogger(__name__)

_RANDOM_STATES = re.compile(r"random_states_([0-9]+)\.pkl")
# Bytes of a message between machines.
_CHUNK = 8 << 20

# Waits for the end of a process and removes a folder. Without pidfd_open, it looks again and again.
_GUARD = """
import os, select, shutil, sys, time
launcher, folder = int(sys.argv[1]), sys.argv[2]
try:
    select.select([os.pidfd_open(launcher)], [], [])
except ProcessLookupError:
    pass
except (OSError, AttributeError):
    while os.path.exists(f"/proc/{launcher}"):
        time.sleep(1)
shutil.rmtree(folder, ignore_errors=True)
"""


@dataclass(frozen=True)
class Copy:
    """A complete copy of the ranks of one machine.

    Attributes:
        save: Its name, the same on all machines; names sort by time.
        ranks: The ranks whose states it has.
        world_size: The ranks of the run that made it.
        folder: Where it is on its machine.
    """

    save: str
    ranks: list[int]
    world_size: int
    folder: str


class MemoryFolder:
    """The copies of one launcher on one machine.

    Raises:
        ValueError: `root` is not a folder, or the system is not Linux.
    """

    def __init__(self, root: str) -> None:
        launcher = os.environ.get(LAUNCHER) or str(os.getppid())
        if sys.platform != "linux" or not os.path.isdir(root):
            raise ValueError(
                f"folder is {root!r}, which is not a folder of a RAM file system on Linux. Mount a tmpfs and pass its "
                "path: PeerMemoryKwargs(folder=...)."
            )
        # The time at which the process started tells it from a later one with its number.
        started = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
        self._launcher, self._root = launcher, root
        self.path = os.path.join(root, f"accelerate-{os.getuid()}-{launcher}-{started}")
        self.local_copies, self.peer_copies = os.path.join(self.path, "copies"), os.path.join(self.path, "peer")

    def open(self) -> None:
        """Make the folder, or remove what a failed attempt left unfinished in it. One process of a machine, before the others use it."""
        if not os.path.lexists(self.path):
            command = [sys.executable, "-S", "-I", "-c", _GUARD, self._launcher, self.path]
            streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            # In a separate session: the launcher ends the process groups of its ranks.
            subprocess.Popen(command, start_new_session=True, cwd="/", **streams)
            os.mkdir(self.path, 0o700)
        about = os.lstat(self.path)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise PermissionError(f"{self.path!r} belongs to another user. Remove it, or pass another folder.")
        for folder in (self.local_copies, self.peer_copies):
            os.makedirs(folder, exist_ok=True)
            self.keep(folder, [entry for entry in os.listdir(folder) if not entry.startswith(PARTIAL)])

    def keep(self, folder: str, names: Sequence[str | None]) -> None:
        """Remove all copies in one of the two folders but those of some names."""
        for entry in os.listdir(folder):
            if entry not in names:
                shutil.rmtree(os.path.join(folder, entry), ignore_errors=True)

    def partial(self, folder: str, save: str) -> str:
        """Return the path at which a copy is written, a folder that is made if it is missing."""
        path = os.path.join(folder, f"{PARTIAL}{save}")
        os.makedirs(path, exist_ok=True)
        return path

    def publish(self, folder: str, save: str) -> str:
        """Let a copy that is complete take its name; return its path."""
        path = os.path.join(folder, save)
        os.rename(os.path.join(folder, f"{PARTIAL}{save}"), path)
        return path

    def complete_copies(self) -> list[Copy]:
        """Return the complete copies on this machine."""
        complete = []
        for folder in (self.local_copies, self.peer_copies):
            for name in sorted(name for name in os.listdir(folder) if not name.startswith(PARTIAL)):
                path = os.path.join(folder, name)
                status = LocalStorage(path).state()
                if status.kind != "complete" or (listing := status.manifest) is None:
                    logger.warning("The copy %s is damaged and is not used: %s", path, status.reason)
                    continue
                ranks = sorted(int(match[1]) for match in map(_RANDOM_STATES.fullmatch, listing.files) if match)
                complete.append(Copy(listing.save, ranks, listing.world_size, path))
        return complete

    def require_room(self, local_size: int, peer_size: int) -> None:
        """Raise MemoryError unless two copies of this machine and two of its peer fit, given the bytes of one of them."""
        import psutil

        present = LocalStorage(self.path).stored().size
        needed = 2 * (local_size + peer_size) - present
        free = min(shutil.disk_usage(self.path).free, psutil.virtual_memory().available)
        if needed > free:
            raise MemoryError(
                f"Copies in memory need {_gib(needed)} more in {self._root!r}: two of this machine's state ({_gib(local_size)} each) and "
                f"two of its peer's ({_gib(peer_size)} each). {_gib(free)} are free. Enlarge the RAM file system "
                f"(mount -o remount,size=... {self._root}), use fewer bytes for other things, or remove PeerMemoryKwargs."
            )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def choices(offers: Sequence[Sequence[Copy]], machines: Sequence[Sequence[int]]) -> list[tuple[str, list[int]]]:
    """Return the copies from which all ranks can resume, the newest first, each with the machine that has it for each machine.

    Args:
        offers: The copies on each machine.
        machines: The ranks of each machine.
    """
    world_size = sum(map(len, machines))
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for machine, copies in enumerate(offers):
        for copy in copies:
            if copy.world_size == world_size:
                holders.setdefault((copy.save, tuple(copy.ranks)), []).append(machine)
    complete = []
    for save in sorted({save for save, _ in holders}, reverse=True):
        of_save = [holders.get((save, tuple(ranks)), []) for ranks in machines]
        if all(of_save):
            complete.append(
                (save, [machine if machine in having else having[0] for machine, having in enumerate(of_save)])
            )
    return complete


# -- between machines --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Incoming:
    """A copy to receive: from which rank, into which folder, and a folder of the same save whose equal files are linked instead."""

    rank: int
    folder: str
    similar: str | None = None


def exchange(group: Any, outgoing: tuple[str, int] | None, incoming: Incoming | None) -> None:
    """Send a copy, given with the rank that receives it, and receive another one at the same time; files that the receiver has are not sent.

    Received files are compared with the manifest, which is written last.

    Collective: call on both ranks.
    """
    sent: list[tuple[Any, torch.Tensor]] = []
    text, missing, wanted, source = "", dict[str, FileEntry](), list[str](), ""
    if outgoing is not None:
        source = Path(outgoing[0], manifest.NAME).read_text("utf-8")
        _send(sent, source, outgoing[1], group)
    if incoming is not None:
        text = _receive(incoming.rank, group)
        listing = Manifest.from_json(text, f"the manifest of rank {incoming.rank}")
        missing = {name: entry for name, entry in listing.files.items() if not _linked(name, entry, incoming)}
        _send(sent, json.dumps(list(missing)), incoming.rank, group)
    if outgoing is not None:
        wanted = json.loads(_receive(outgoing[1], group))
    for work, _ in sent:
        work.wait()
    sends = _sends(outgoing[0], outgoing[1], source, wanted, group) if outgoing is not None else iter(())
    receives = _receives(incoming.rank, missing, group) if incoming is not None else iter(())
    problem, writer = None, _writes(incoming, missing) if incoming is not None else None
    for work, data in itertools.zip_longest(sends, receives):
        try:
            if data is not None and writer is not None and problem is None:
                writer.send(data)
        except OSError as error:  # after all is received: the sender would wait
            problem = error
        if work is not None:
            work.wait()
    if problem is not None:
        raise problem
    if incoming is not None:
        with durable.durable(os.path.join(incoming.folder, manifest.NAME)) as file:
            file.write(text.encode())


def _send(sent: list[tuple[Any, torch.Tensor]], text: str, rank: int, group: Any) -> None:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for tensor in (torch.tensor([len(data)]), data):
        sent.append((dist.isend(tensor, rank, group=group), tensor))


def _receive(rank: int, group: Any) -> str:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, group=group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, rank, group=group)
    return data.numpy().tobytes().decode()


def _linked(name: str, entry: FileEntry, incoming: Incoming) -> bool:
    """Link a file that is equal in the similar folder; return whether that was possible."""
    if incoming.similar is None:
        return False
    same = Manifest.read(incoming.similar).files.get(name)
    if same is None or (same.size, same.checksum) != (entry.size, entry.checksum):
        return False
    path = os.path.join(incoming.folder, *name.split("/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.link(os.path.join(incoming.similar, *name.split("/")), path)
    return True


def _chunks(size: int) -> Iterator[int]:
    return (min(_CHUNK, size - start) for start in range(0, size, _CHUNK))


def _sends(folder: str, rank: int, source: str, names: Sequence[str], group: Any) -> Iterator[Any]:
    """Begin to send a chunk of the files at a time."""
    files = Manifest.from_json(source, folder).files
    for name in names:
        with open(os.path.join(folder, *name.split("/")), "rb") as file:
            for size in _chunks(files[name].size):
                data = bytearray(size)
                file.readinto(data)
                yield dist.isend(torch.frombuffer(data, dtype=torch.uint8), rank, group=group)


def _receives(rank: int, files: Mapping[str, FileEntry], group: Any) -> Iterator[torch.Tensor]:
    """Receive a chunk of the files at a time."""
    for entry in files.values():
        for size in _chunks(entry.size):
            data = torch.empty(size, dtype=torch.uint8)
            dist.recv(data, rank, group=group)
            yield data


def _writes(incoming: Incoming, files: Mapping[str, FileEntry]) -> Generator[None, torch.Tensor, None]:
    """Write files of the chunks that are sent to this generator, and compare each with its checksum."""

    def written() -> Generator[None, torch.Tensor, None]:
        for name, entry in files.items():
            path = os.path.join(incoming.folder, *name.split("/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with durable.durable(path) as file:
                for _ in _chunks(entry.size):
                    file.write((yield).numpy().data)
            if lines := manifest.changed(name, entry, file.raw.checksum.hexdigest()):
                raise OSError(f"rank {incoming.rank} sent a copy that has changed: {lines[0]}")
        yield  # for the last chunk

    writer = written()
    next(writer)
    return writer
