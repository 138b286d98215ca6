"""One writer at a time for a place: whoever saves there holds a lock, which the system drops with the process.

Source:
    https://man7.org/linux/man-pages/man2/flock.2.html
"""

import contextlib
import errno
import logging
import os
import time

try:
    import fcntl
except ImportError:  # Windows, where nobody gets a lock, nor is refused one
    fcntl = None

logger = logging.getLogger(__name__)

# A save that goes on in the background ends by itself; and a worker process of a run that was killed may outlive it a little.
PATIENCE_S = 60.0
_TELL_AFTER_S = 2.0
_PAUSE_S = 0.05


class Busy(RuntimeError):
    """Somebody else saves to the place."""


class Lock:
    """A file that is locked from `take` to `release`.

    Args:
        path: the file. It is made, and removed at the end.
        what: the place that it stands for, for messages.
    """

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        self._descriptor, self._pid = -1, os.getpid()

    def __del__(self) -> None:
        self.release()

    def take(self, word: str = "", patience_s: float | None = None) -> None:
        """Get the lock, and wait for whoever has it. Any process, alone; in the thread that calls.

        Args:
            word: what is found by others who want the lock; if they bring the same, waiting is useless, and both are told so.
            patience_s: how long to wait; a minute by default.

        Raises:
            Busy: somebody else has it, still, or has brought the same word.
        """
        if fcntl is None:
            return
        begun, told = time.monotonic(), False
        patience_s = PATIENCE_S if patience_s is None else patience_s
        while not self._try():
            holder = self._word()
            if word and holder == word:
                raise Busy(
                    f"Two machines of this run save to {self.what!r}, because they share this file system. save_on_each_node=True is "
                    "for machines with disks of their own: leave it out."
                )
            waited = time.monotonic() - begun
            if waited >= patience_s:
                raise Busy(
                    f"Another process has been saving to {self.what!r} for {waited:.0f} s: it holds {self.path!r}. Only one run at a "
                    "time may save there; is a former one still running?"
                )
            if not told and waited >= _TELL_AFTER_S:
                told = True
                logger.warning("Another process is saving to %s; waiting for it.", self.what)
            time.sleep(_PAUSE_S)
        if self._descriptor >= 0:
            with contextlib.suppress(
                OSError
            ):  # a full disk has no room for a word, and may have some after the old one has gone
                os.ftruncate(self._descriptor, 0)
                os.write(self._descriptor, word.encode())

    def _try(self) -> bool:
        """Say whether the lock is ours now, or the file system has no locks."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                self._descriptor, descriptor = descriptor, -1
                return True
        except FileNotFoundError:  # the former holder has removed it meanwhile
            pass
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                return True
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return False

    def _word(self) -> str:
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                return file.read(100)
        except OSError:
            return ""

    def release(self) -> None:
        """Give the lock up, if it is ours."""
        descriptor = self._descriptor
        if descriptor < 0:
            return
        ours = self._pid == os.getpid()  # a fork has the descriptor, too, and must not give up what is its parent's
        try:
            if ours:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
        finally:
            self._descriptor = -1
            with contextlib.suppress(OSError):
                if ours:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)
