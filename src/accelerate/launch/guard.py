"""Ends what a launcher had started when the launcher itself was killed, and cannot do it any more.

A small process of its own reads a pipe from the launcher. Its end without a farewell means that the launcher is gone. The
processes are asked to end then, as by a scheduler, and killed some time later. This module is also that process's program, so
it imports nothing of the package.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

FAREWELL = "end"
FORGET = "forget"
# How long processes have after SIGTERM; what torch's elastic launcher gives them.
GRACE_S = 30.0
_LOOK_S = 0.02
# A scheduler that signals every process of a job must not take the guard away.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def end_groups(groups: Iterable[int], grace: float) -> None:
    """End process groups: ask with SIGTERM, wait, kill what is left.

    Args:
        groups: their numbers; those without processes are passed over.
        grace: for how long to wait, in seconds.
    """
    left = [group for group in groups if _signal(group, signal.SIGTERM)]
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        left = [group for group in left if _signal(group, 0)]
    for group in left:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except PermissionError:
        return number == 0  # macOS says so of a group whose processes are dead and not yet waited for
    except OSError:
        return False
    return True


class Guard:
    """The launcher's end of the pipe. Only where there are process groups, which Windows does not have.

    Args:
        grace: how long the processes have to end by themselves, in seconds.
    """

    def __init__(self, grace: float = GRACE_S) -> None:
        self._process: subprocess.Popen | None = None
        if hasattr(os, "killpg"):
            # Outputs closed: who reads those of the launcher must see their end when the launcher ends. A session of its own:
            # what the terminal sends to the launcher is not for it.
            with _blocked():  # it inherits that, and so ignores signals from its first moment
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(grace)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def watch(self, groups: Iterable[int]) -> None:
        """Name the process groups to end instead of those named before."""
        self._say(FORGET, *map(str, groups))

    def close(self) -> None:
        """Dismiss the guard: the processes have ended, or may go on."""
        if self._process is not None:
            self._say(FAREWELL)
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _say(self, *words: str) -> None:
        if self._process is not None:
            # A guard that somebody has killed protects nobody, and is no reason to fail.
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write("".join(f"{word}\n" for word in words).encode())
                self._process.stdin.flush()


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in _IGNORED])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """Read what the launcher says until it ends, and end its processes unless it said farewell."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        word = line.strip()
        if word == FAREWELL:
            return
        if word == FORGET:
            groups = []
        else:
            groups.append(int(word))
    end_groups(groups, float(sys.argv[1]))


if __name__ == "__main__":
    main()
