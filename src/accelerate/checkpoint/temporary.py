"""Temporary folders that do not outlive their process: not when it exits, and not for long when it is killed."""

import atexit
import contextlib
import os
import shutil
import tempfile
from typing import IO

try:
    import fcntl
except ImportError:  # not on Windows, where the folders of killed processes stay
    fcntl = None

_PREFIX = "accelerate_checkpoint_"
_FOLDER, _LOCK = "files", "lock"
_open: dict[str, tuple[int, IO[bytes] | None]] = {}


def make() -> str:
    """Return a new empty folder in ``$TMPDIR``, after removing those of processes that were killed.

    It is removed by `discard`, or when this process exits; a fork that exits leaves it.
    """
    _sweep(tempfile.gettempdir())
    outer = tempfile.mkdtemp(prefix=_PREFIX)
    lock = None
    if fcntl is not None:
        # The system drops the lock with the process. A process id would not do: it means another process in another container.
        lock = open(os.path.join(outer, _LOCK), "wb")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks, where nobody gets one
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = os.path.join(outer, _FOLDER)
    os.mkdir(folder)
    _open[folder] = (os.getpid(), lock)
    return folder


def discard(folder: str) -> None:
    """Remove a folder that `make` made in this process; one that is gone is no matter.

    Args:
        folder: its path.
    """
    owner, lock = _open.pop(folder, (0, None))
    if owner != os.getpid():  # gone already, or inherited by a fork
        return
    shutil.rmtree(os.path.dirname(folder), ignore_errors=True)
    if lock is not None:
        lock.close()


def _sweep(where: str) -> None:
    if fcntl is None:
        return
    for entry in os.listdir(where):
        path = os.path.join(where, entry)
        # One that has its folder has its lock taken.
        if not entry.startswith(_PREFIX) or not os.path.isdir(os.path.join(path, _FOLDER)):
            continue
        # Nor does one get at those of other users.
        with contextlib.suppress(OSError), open(os.path.join(path, _LOCK), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


@atexit.register
def _discard_all() -> None:
    for folder in list(_open):
        discard(folder)
