"""Forks that leave the new process able to look up names.

While processes are forked, other threads of this one talk to those that are there already: torch's store looks up the name of
everybody who connects. If such a thread holds the lock of glibc's resolver in that moment, nobody ever gives it back in the new
process, which then hangs for ever when it connects to somebody itself. glibc takes care of its other locks, and not of this one.

Source: https://sourceware.org/git/?p=glibc.git;a=blob;f=resolv/resolv_conf.c
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

_PROBE = "__res_init"
# Nobody else is in a new process, so its lock is free at once, or never.
_PATIENCE_S = 1.0
_ATTEMPTS = 20


@contextlib.contextmanager
def sound() -> Iterator[None]:
    """Let `os.fork` try again, for as long as the block runs, where the new process could not look up names."""
    probe = _probe()
    if probe is None:
        yield
        return
    fork = os.fork
    os.fork = lambda: _fork(fork, probe)
    try:
        yield
    finally:
        os.fork = fork


def _probe() -> Callable[[], object] | None:
    """Return what takes the lock and gives it back, without asking any network; None where the system has no such lock."""
    if not hasattr(os, "fork"):
        return None
    with contextlib.suppress(OSError, TypeError):
        return getattr(ctypes.CDLL(None), _PROBE, None)
    return None


def _fork(fork: Callable[[], int], probe: Callable[[], object]) -> int:
    for _ in range(_ATTEMPTS):
        reader, writer = os.pipe()
        child = fork()
        if child == 0:
            os.close(reader)
            if not _returns(probe):
                os._exit(1)
            os.write(writer, b"1")
            os.close(writer)
            return 0
        os.close(writer)
        is_sound = os.read(reader, 1)
        os.close(reader)
        if is_sound:
            return child
        os.waitpid(child, 0)
    return fork()


def _returns(probe: Callable[[], object]) -> bool:
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return not thread.is_alive()
