"""What a file system does in one step, and how it is told to reach the disk."""

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def sync_folder(path: str) -> None:
    """Write a folder's own entries to the disk, where the system can.

    Args:
        path: the folder.
    """
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
    """Write the entries of a folder and of those below it to the disk.

    Args:
        path: the folder.
    """
    for folder, _, _ in os.walk(path, topdown=False):
        sync_folder(folder)


@functools.cache
def _call(name: str, *arguments: Any) -> Callable[..., int] | None:
    """Return a function of the C library that Python does not offer; None where there is none."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = arguments
    return function


_SYNC_FILE_RANGE_WRITE = 2


def _sync_file_range() -> Callable[..., int] | None:
    return _call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def start_writing(descriptor: int, start: int, size: int) -> None:
    """Let the disk begin with what was written to a file, so that it works while more is written. Only fsync waits for it.

    Args:
        descriptor: of the file.
        start: where the part begins.
        size: how long it is.

    Source:
        https://man7.org/linux/man-pages/man2/sync_file_range.2.html
    """
    begin = _sync_file_range()
    if begin is not None:  # where it fails, fsync does all of it, and tells what is wrong
        begin(descriptor, start, size, _SYNC_FILE_RANGE_WRITE)


def set_direct(descriptor: int, direct: bool) -> bool:
    """Let writes to a file go past the system's cache, or not; say whether they do.

    They must then come from memory, and go to places in the file, that are multiples of a disk's sectors.
    ``ACCELERATE_CHECKPOINT_DIRECT_IO=0`` switches that off, for a file system that does it badly.

    Args:
        descriptor: of the file.
        direct: whether they should.
    """
    if fcntl is None or not hasattr(os, "O_DIRECT"):
        return False
    if direct and os.environ.get("ACCELERATE_CHECKPOINT_DIRECT_IO") == "0":
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:  # a file system without
        return False
    return direct


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _renameat2() -> Callable[..., int] | None:
    return _call("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


def exchange(left: str, right: str) -> bool:
    """Exchange two folders in one step; say whether the system could.

    Args:
        left: a path.
        right: another one on the same file system.

    Source:
        https://man7.org/linux/man-pages/man2/rename.2.html
    """
    rename = _renameat2()
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0
