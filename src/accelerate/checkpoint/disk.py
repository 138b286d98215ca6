"""What a file system does in one step, and how it is told to reach the disk."""

import ctypes
import errno
import functools
import os
from collections.abc import Callable


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


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function


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
