"""Ends what a launcher had started when the launcher itself was killed, and cannot do it any more.

A small process reads lines from the launcher: the process groups to end. When the pipe ends, the launcher is gone; the
last groups are asked to end then, as by a scheduler, and killed some time later. An empty line dismisses the guard. This module is
also that process's program, so it imports nothing of the package.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

_LOOK_S = 0.02
# A scheduler that signals every process of a job must not take the guard away.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
# Runs a command that the kernel ends with its launcher, also before a guard knows of it. Nothing of a user runs before that is so,
# and a launcher that had gone already is noticed. What Python does to signals for itself is undone.
_BOUND = """
import ctypes, os, signal, sys
for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
    if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN: signal.signal(number, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"accelerate launch: {sys.argv[2]} cannot be started: {error.strerror}.")
"""
# Without the user's modules, unless Python finds its own by a variable of the user's.
_PYTHON = [sys.executable, "-S", *([] if os.environ.get("PYTHONHOME") else ["-I"])]
_BLOCKED = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def bound(command: Sequence[str]) -> list[str]:
    """Return a command that does the same, and is asked to end when this process is killed, where the kernel can (Linux)."""
    if sys.platform != "linux":
        return list(command)
    return [*_PYTHON, "-c", _BOUND, str(os.getpid()), *command]


def end_groups(groups: Iterable[int], grace: float) -> None:
    """End process groups: ask with SIGTERM, wait `grace` seconds, kill what is left."""
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
        return number == 0  # macOS reports this of a group whose processes are dead and not yet waited for
    except OSError:
        return False
    return True


class Guard:
    """The launcher's end of the pipe, where there are process groups; `grace` is in seconds."""

    def __init__(self, grace: float = 30.0) -> None:
        self._process: subprocess.Popen | None = None
        if not hasattr(os, "killpg"):
            return
        # The guard inherits what is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            # Outputs closed: a reader of the launcher's output must see its end when the launcher ends. A new session: what
            # the terminal sends to the launcher is not for it.
            # The text of this module, as a zipped package has no file.
            source = __loader__.get_source(__name__)
            command = [*_PYTHON, *(["-c", source] if source else [__file__]), str(grace)]
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, **streams, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def watch(self, groups: Iterable[int]) -> None:
        """Name the process groups to end instead of those named before; none dismisses the guard."""
        if self._process is not None:
            # A guard that was killed protects nothing, and is no reason to fail.
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{' '.join(map(str, groups))}\n".encode())
                self._process.stdin.flush()

    def close(self) -> None:
        """Dismiss the guard: the processes have ended, or may continue."""
        if self._process is not None:
            self.watch([])
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None


if __name__ == "__main__":
    _groups: list[int] = []
    for _line in sys.stdin:
        _groups = [int(_word) for _word in _line.split()]
    end_groups(_groups, float(sys.argv[1]))
