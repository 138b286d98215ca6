"""What processes print, on its way to the cell that started them."""

import contextlib
import io
import os
import sys
import threading
from typing import Any

FILES = {1: "stdout.log", 2: "stderr.log"}


class WholeLines(io.TextIOBase):
    """Passes on whole lines: a notebook's own stream sends each piece of a `print`, and those of several processes mix.

    Args:
        stream: where the lines go.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Take text, and pass on what ends with a line.

        Args:
            text: any.
        """
        with self._lock:
            # A progress bar goes back to the start of its line.
            end = max(text.rfind("\n"), text.rfind("\r")) + 1
            # The rest is changed first: an interrupt in between would have it written twice.
            lines, self._rest = (self._rest + text[:end], text[end:]) if end else ("", self._rest + text)
            if lines:
                self._stream.write(lines)
        return len(text)

    def flush(self) -> None:
        """Pass on everything."""
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self._stream.write(rest)
            self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Tell whether the stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return self._stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def into_files(directory: str) -> None:
    """Write all that this process puts out into files, which torch reads, and prints with the prefix.

    Args:
        directory: of this process.
    """
    for number, name in FILES.items():
        descriptor = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in FILES)  # noqa: SIM115


def in_whole_lines() -> None:
    """Let this process print whole lines, where a notebook has put its own streams into the place of the standard ones.

    The same where the standard ones are unbuffered.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, WholeLines) and not _keeps_lines_whole(stream):
            setattr(sys, name, WholeLines(stream))


def _keeps_lines_whole(stream: Any) -> bool:
    return isinstance(stream, io.TextIOWrapper) and not stream.write_through  # PYTHONUNBUFFERED sets that


def descriptors_are_shown() -> bool:
    """Tell whether what is written to descriptor 1 comes to the user's eyes: in a notebook, only if its kernel reads it."""
    return isinstance(sys.stdout, io.TextIOWrapper) or getattr(sys.stdout, "watch_fd_thread", None) is not None


def flush() -> None:
    """Print what still waits, if that can be done: an error of the function must not be hidden by one of its output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
