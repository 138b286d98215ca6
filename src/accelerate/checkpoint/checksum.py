"""Checksums of a checkpoint's files: fast enough that nobody is tempted to switch them off.

They tell damage (a flipped bit, a truncated or swapped file), not malice: whoever can change a file can change the manifest,
too. So a fast hash is the right one. XXH3-128 from `xxhash` hashes 14 GiB/s on one core here, where zlib's CRC-32 does 4 and
SHA-256 less than 2; its 128 bits make an unseen change a matter of chance that does not happen, and the library is the
author's own C code with releases since 2012, also used by Hugging Face's `datasets`.

A file is hashed in pieces, and the digest of the file is the digest of its pieces' digests: threads share the work, a reader
may begin anywhere, and a file that is written in one stream and read in another has the same digest.

Source:
    https://xxhash.com, https://github.com/ifduyue/python-xxhash
"""

import os
from collections.abc import Callable

from accelerate.checkpoint.threads import each

ALGORITHM = "xxh3-128"
CHUNK = 16 << 20

# How much is read at a time: it is still in the processor's cache when it is hashed.
_STEP = 1 << 20

Path = str | os.PathLike[str]


class Checksum:
    """The checksum of a file that is written or read from its beginning to its end.

    Example:
        >>> checksum = Checksum()
        >>> checksum.update(b"some bytes")
        >>> checksum.size, len(checksum.hexdigest())
        (10, 32)
    """

    def __init__(self) -> None:
        import xxhash

        self._new = xxhash.xxh3_128
        self._digests: list[bytes] = []
        self._piece = self._new()
        self._filled = 0
        self.size = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes.

        Args:
            data: a contiguous buffer.
        """
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

    def hexdigest(self) -> str:
        """Return the checksum of what was added so far."""
        tail = [self._piece.digest()] if self._filled else []
        return combined([*self._digests, *tail])


def combined(digests: list[bytes]) -> str:
    """Return the checksum of a file from those of its pieces, in order.

    Args:
        digests: one of each `CHUNK` bytes; the last piece may be shorter.
    """
    import xxhash

    return xxhash.xxh3_128(b"".join(digests)).hexdigest()


def of_piece(data: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of one piece.

    Args:
        data: at most `CHUNK` bytes.
    """
    import xxhash

    return xxhash.xxh3_128(data).digest()


def threads() -> int:
    """Return how many threads of this process may read at a time: the processes of a node share its processors."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))))


def of_file(path: Path, threads: int = 2, progress: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Return the size and the checksum of a file. Any rank, alone.

    Args:
        path: the file.
        threads: how many pieces are read at a time.
        progress: called with the number of bytes of each piece, from any thread.

    Raises:
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size

        def piece(start: int) -> bytes:
            end = min(start + CHUNK, size)
            digest = _read(descriptor, start, end, os.fspath(path))
            if progress is not None:
                progress(end - start)
            return digest

        starts = range(0, size, CHUNK)
        return size, combined(each(piece, starts, threads))
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, end: int, path: str) -> bytes:
    """Read a piece of a file, and return its digest."""
    import xxhash

    digest = xxhash.xxh3_128()
    if end - start > _STEP and hasattr(os, "posix_fadvise"):
        # Threads that read one file by turns look to the system as if they jumped about, and it would not read ahead.
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
    scratch = memoryview(bytearray(min(_STEP, end - start)))
    while start < end:
        part = scratch[: min(_STEP, end - start)]
        length = read_at(descriptor, part, start)
        if not length:
            raise OSError(f"{path!r} became shorter while it was read")
        digest.update(part[:length])
        start += length
    return digest.digest()


def read_at(descriptor: int, part: memoryview, start: int) -> int:
    """Read from a place in a file, and return how many bytes came; 0 at its end.

    Args:
        descriptor: of the file.
        part: takes the bytes.
        start: the place.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [part], start)
    data = os.pread(descriptor, len(part), start)
    part[: len(data)] = data
    return len(data)
