"""Single key presses from a terminal, on POSIX systems and on Windows."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

UP, DOWN, FIRST, LAST, ENTER = "up", "down", "first", "last", "enter"

# What terminals send for keys without a letter; the second form is that of the application mode.
_SEQUENCES = {
    "[A": UP,
    "OA": UP,
    "[B": DOWN,
    "OB": DOWN,
    "[H": FIRST,
    "OH": FIRST,
    "[1~": FIRST,
    "[F": LAST,
    "OF": LAST,
    "[4~": LAST,
}
_WINDOWS = {"H": UP, "P": DOWN, "G": FIRST, "O": LAST}
_LETTERS = {"k": UP, "j": DOWN, "\r": ENTER, "\n": ENTER, "\x10": UP, "\x0e": DOWN}
# A real key sends its sequence at once; only a person pauses this long after the Escape key.
_PAUSE = 0.05
# How often a waiting process looks for a signal that came at the wrong moment.
_LOOK = 0.25

ReadKey = Callable[[], str]


def capable() -> bool:
    """Say whether this process talks to a terminal in which a menu can be drawn."""
    try:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return False
        # `input` replaced by a program, as notebooks do, has no keys to read.
        if sys.stdin.fileno() != 0 or sys.stdout.fileno() != 1:
            return False
    except (AttributeError, OSError, ValueError):
        return False
    if os.name == "nt":
        return _enable_windows_sequences()
    if os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        import termios

        termios.tcgetattr(0)
    except Exception:  # termios.error is no OSError
        return False
    return True


@contextlib.contextmanager
def reading() -> Iterator[ReadKey]:
    """Let the terminal hand over each key at once, and bring it back to what it was at the end.

    The function that it yields waits for a key and returns `UP`, `DOWN`, `FIRST`, `LAST`, `ENTER`, a printable character, or an
    empty string for any other key.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
        EOFError: the terminal was closed, or Ctrl-D was pressed.
    """
    if os.name == "nt":
        yield _windows_key
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        # Not the default, which throws away what was typed ahead.
        tty.setcbreak(0, termios.TCSADRAIN)
        yield _posix_key
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def wait() -> None:
    """Wait until the terminal has something to read, where there is a terminal.

    A read that is blocked does not notice a Ctrl-C that came just before it, and would go on until the next key.
    """
    try:
        if os.name == "nt" or not sys.stdin.isatty() or sys.stdin.fileno() != 0:
            return
    except (AttributeError, OSError, ValueError):
        return
    import select

    while not select.select([0], [], [], _LOOK)[0]:
        pass


def _posix_key() -> str:
    import select

    def more() -> bool:
        return bool(select.select([0], [], [], _PAUSE)[0])

    wait()
    try:
        data = os.read(0, 1)
    except OSError:  # the terminal is gone
        data = b""
    if data in (b"", b"\x04"):
        raise EOFError
    if data != b"\x1b":
        while data[0] >= 0xC0 and len(data) < 4 and more():  # the rest of one character
            data += os.read(0, 1)
        return _letter(data.decode("utf-8", errors="replace"))
    sequence = ""
    while len(sequence) < 8 and more():
        sequence += os.read(0, 1).decode("latin-1")
        if len(sequence) > 1 and (sequence[-1].isalpha() or sequence[-1] == "~"):
            break
    return _SEQUENCES.get(sequence, "")


def _windows_key() -> str:
    import msvcrt

    letter = msvcrt.getwch()
    if letter in ("\x00", "\xe0"):
        return _WINDOWS.get(msvcrt.getwch(), "")
    if letter == "\x03":
        raise KeyboardInterrupt
    if letter in ("\x04", "\x1a"):
        raise EOFError
    return _letter(letter)


def _letter(letter: str) -> str:
    return _LETTERS.get(letter, letter if letter.isprintable() else "")


def _enable_windows_sequences() -> bool:
    """Make the console of Windows understand movements of the cursor; old ones cannot."""
    try:
        import ctypes

        kernel = ctypes.windll.kernel32
        handle, mode = kernel.GetStdHandle(-11), ctypes.c_uint32()
        if not kernel.GetConsoleMode(handle, ctypes.byref(mode)):
            return False
        return bool(kernel.SetConsoleMode(handle, mode.value | 0x0004))
    except (AttributeError, OSError):
        return False
