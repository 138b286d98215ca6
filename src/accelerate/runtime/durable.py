"""Bytes on the disk: hashed while they are written, there when the file is closed, and read back by several threads.

Checksums find damage (a flipped bit, a truncated or swapped file), not malice: a user who can change a file can change the manifest, too.
So a fast hash is the right one. XXH3-128 from `xxhash` hashes 14 GiB/s on one core here, where zlib's CRC-32 does 4 and SHA-256 less
than 2. A file is hashed in pieces of `CHUNK` bytes, and its checksum is the digest of their digests: threads share the work, and a file
that is written in one stream and read in another has the same checksum.

Source:
    https://xxhash.com, https://github.com/ifduyue/python-xxhash
"""

import contextlib
import ctypes
import errno
import functools
import io
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Path = str | os.PathLike[str]

# In front of the name of what is written aside.
STAGING_PREFIX = ".saving_"

ALGORITHM = "xxh3-128"
CHUNK = 16 << 20

# How much is written at a time, before the disk begins with it: so little that it is nearly done when a file of some megabytes is closed.
BLOCK = 2 << 20
# Smaller pieces are collected until they are so much. Larger ones are written from where they are, without a copy.
_COLLECTED = 128 << 10
# How much is read at a time.
_STEP = 1 << 20


# A thread may set `pace.rest`, which is called after each block that it writes, with the seconds that the block took.
pace = threading.local()


def each(task: Callable[[Any], T], items: Iterable[Any], threads: int) -> list[T]:
    """Return what a task returns for each item, in order, or raise its first error once no task runs.

    An interpreter that is about to exit starts no threads any more; then all is done in the one that calls.

    Not a collective.
    """
    items = list(items)
    if min(threads, len(items)) < 2:
        return list(map(task, items))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="checkpoint") as pool:
        try:
            results = pool.map(task, items)  # which begins with all of them now
        except RuntimeError:
            results = map(task, items)
        return list(results)


# -- checksums ----------------------------------------------------------------------------------------------------------


class Checksum:
    """The checksum of a file that is written or read from its beginning to its end."""

    def __init__(self, data: Any = b"") -> None:
        import xxhash

        self._new = xxhash.xxh3_128
        self._digests: list[bytes] = []
        self._piece = self._new()
        self._filled = 0
        self.size = 0
        if data:
            self.update(data)

    def update(self, data: Any) -> None:
        """Add the bytes of a contiguous buffer."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        while len(view):
            part = view[: CHUNK - self._filled]
            self._piece.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == CHUNK:
                self._digests.append(self._piece.digest())
                self._piece, self._filled = self._new(), 0

    def digests(self) -> list[bytes]:
        """Return the digests of the pieces of what was added so far."""
        return [*self._digests, *([self._piece.digest()] if self._filled else [])]

    def hexdigest(self) -> str:
        """Return the checksum of what was added so far."""
        return combined(self.digests())


def threads() -> int:
    """Return how many threads of this process may read at a time: the processes of a node share its processors."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))))


def of_file(path: Path, threads: int = 2) -> tuple[int, str]:
    """Return the size and the checksum of a file, of which threads read pieces. Not a collective."""
    size, pieces = pieces_of_file(path, threads)
    return size, combined(pieces)


def pieces_of_file(path: Path, threads: int = 2) -> tuple[int, list[bytes]]:
    """Return the size of a file, and the digests of its pieces. Not a collective."""
    size = require_file(path)
    return size, digests(path, range(0, size, CHUNK), size, threads)


def combined(pieces: Iterable[bytes]) -> str:
    """Return the checksum of a file from the digests of its pieces, in their order."""
    import xxhash

    return xxhash.xxh3_128(b"".join(pieces)).hexdigest()


def digests(path: Path, starts: Iterable[int], size: int, threads: int = 2) -> list[bytes]:
    """Return the digests of pieces of a file of `size`, each of which starts at a multiple of ``CHUNK``."""
    descriptor, name, starts = os.open(path, os.O_RDONLY), os.fspath(path), list(starts)
    try:
        if len(starts) == 1:  # most files are one piece
            return [_digest(descriptor, starts[0], min(starts[0] + CHUNK, size), name)]
        return each(lambda start: _digest(descriptor, start, min(start + CHUNK, size), name), starts, threads)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, start: int, end: int, path: str) -> bytes:
    """Return the digest of a piece of a file."""
    import xxhash

    if hasattr(os, "posix_fadvise"):
        # Threads that read one file by turns look to the system as if they jumped about, and it would not read ahead.
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
    # Read, not mapped: a process dies of a mapped page that cannot be read, because a disk is bad or a file became shorter.
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(min(_STEP, end - start)))
    while start < end:
        if not (size := os.preadv(descriptor, [block[: end - start]], start)):
            raise OSError(f"{path!r} became shorter while it was read")
        digest.update(block[:size])
        start += size
    return digest.digest()


# -- files --------------------------------------------------------------------------------------------------------------


class HashedFile(io.BufferedWriter):
    """A file that is hashed while it is written, and is there in full when its ``with`` block ends well, else not at all.

    It collects small pieces for its raw file, which hashes and stores them: see `DiskFile` for what a raw file has.
    """

    raw: Any

    def __init__(self, raw: Any) -> None:
        super().__init__(raw, _COLLECTED)

    # Torch's writers flush and close the file that they are given. This flush of io does nothing: only the end of the block counts.
    flush = close = io.IOBase.flush

    @property
    def status(self) -> os.stat_result:
        """The system's record of a finished file on the disk."""
        status: os.stat_result = self.raw.status
        return status

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        raw, is_complete = self.raw, False
        try:
            if error is None and raw.problem is None:
                super().flush()
                raw.finish()
                is_complete = True
        except Exception as failure:
            raw.problem = failure
        finally:
            if not is_complete:
                raw.discard()
        # Torch's writer, for one, reports something else when its file fails.
        if raw.problem is not None and (named := raw.named(raw.problem)) is not error:
            raise named from error


class DiskFile(io.FileIO):
    """The raw file of a `HashedFile` on the disk, which is written under the name `aside` and synced, and then takes its name.

    Without that name it is for a folder that nothing reads yet: it is not on the disk before `sync_file`, which many files need only
    once. The disk begins with each block while the next one is written, so that it has little left to do at the end.
    """

    def __init__(self, path: str, aside: str = "") -> None:
        aside = aside or path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)  # of a process that was killed
        super().__init__(aside, "x")
        self.checksum = Checksum()
        self.problem: Exception | None = None  # of `write`
        self._path, self._aside = path, aside
        self._begun = 0  # the disk has begun with so much
        self._since = time.monotonic()

    def write(self, data: Any) -> int:
        """Hash and store all of a buffer of bytes; return how many these are."""
        descriptor, checksum = self.fileno(), self.checksum
        try:
            for start in range(0, len(data), BLOCK):
                part = data[start : start + BLOCK]
                checksum.update(part)
                while len(part):
                    part = part[os.write(descriptor, part) :]
                if (ready := checksum.size - self._begun) >= BLOCK:
                    _start_writing(descriptor, self._begun, ready)
                    self._begun += ready
                    if (rest := getattr(pace, "rest", None)) is not None:
                        rest(time.monotonic() - self._since)
                    self._since = time.monotonic()
        except Exception as error:
            self.problem = error
            raise
        return len(data)

    def finish(self) -> None:
        """Let the file take its name, if it has a second one once it is on the disk."""
        if self._aside != self._path:
            os.fsync(self.fileno())
        self.status = os.fstat(self.fileno())
        if not os.path.samestat(self.status, os.lstat(self._aside)):
            raise OSError(errno.EBUSY, "Another process writes this file at the same time")
        self.close()
        if self._aside != self._path:
            os.replace(self._aside, self._path)

    def discard(self) -> None:
        """Remove what was written."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self._aside)

    def named(self, error: Exception) -> Exception:
        """Return an error that names the file, which a descriptor does not know."""
        if not isinstance(error, OSError):
            return error
        return OSError(error.errno or errno.EIO, error.strerror or str(error), self._aside)


def durable(path: Path, writer: int | None = None) -> HashedFile:
    """Write a file aside that takes its place, complete and on the disk, when the block ends well, else nothing.

    Args:
        path: The file.
        writer: Number of this process among those that may write the file at a time: the last one counts. None if only one does.
    """
    folder, name = os.path.split(os.fspath(path))
    suffix = "" if writer is None else f".{writer}"
    return HashedFile(DiskFile(os.fspath(path), os.path.join(folder, f"{STAGING_PREFIX}{name}{suffix}")))


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[str]:
    """Give the name of a temporary file that replaces a file when the block ends well, else is removed.

    A process that dies while it writes leaves the old file, never half of the new one. Unlike `durable`, for what
    writes by name, and for files that several processes may write at a time; the disk gets it when it likes.
    """
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # a link that leads elsewhere would be written through
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# An empty step, one dot or two, a drive, and what separates steps on one system or ends a name on all.
_LEADS_OUT = re.compile(r"(?:^|/)(?:\.{0,2}(?:/|\Z)|[^/]:)|[\\\0]" + "|:" * (os.name == "nt"))


def is_inside(name: Any) -> bool:
    """Return whether a path that a manifest or an index of shards gives stays within its folder, on every system."""
    return not outside((name,))


def outside(names: Iterable[Any]) -> list[Any]:
    """Return those of some paths that `is_inside` refuses."""
    return [name for name in names if not isinstance(name, str) or _LEADS_OUT.search(name) is not None]


def require_file(path: Path) -> int:
    """Return the size of a file; raise OSError, which names it, for what is no regular file: a reader would wait for a named pipe forever."""
    about = os.stat(path)
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(about.st_mode):
        kind = "a named pipe" if stat.S_ISFIFO(about.st_mode) else "a socket or a device"
        text = f"It must be a regular file, and is {kind}. Remove it, or put the file there"
        raise OSError(errno.EINVAL, text, os.fspath(path))
    return about.st_size


# -- the file system ----------------------------------------------------------------------------------------------------


def sync_file(path: Path) -> None:
    """Write a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), os.fspath(path)) from None
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Write a folder's own entries to the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # a file system that cannot sync folders
            raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


def sync_tree(path: str) -> None:
    """Write the entries of a folder and of those below it to the disk."""
    for folder, _, _ in os.walk(path, topdown=False):
        sync_folder(folder)


@functools.cache
def c_function(name: str, *kinds: str) -> Callable[..., int] | None:
    """Return a function of the C library that Python does not offer; None where there is none."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [getattr(ctypes, f"c_{kind}") for kind in kinds]
    return function


def _start_writing(descriptor: int, start: int, size: int) -> None:
    """Let the disk begin with a part of a file (sync_file_range). Only fsync waits for it."""
    begin = c_function("sync_file_range", "int", "int64", "int64", "uint")
    if begin is not None:  # where it fails, fsync does all of it, and reports what is wrong
        begin(descriptor, start, size, 2)  # SYNC_FILE_RANGE_WRITE


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def exchange(left: str, right: str) -> bool:
    """Exchange two folders of one file system in one step (renameat2); return whether the system could."""
    rename = c_function("renameat2", "int", "char_p", "int", "char_p", "uint")
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0
