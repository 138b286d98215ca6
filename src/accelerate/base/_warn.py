"""Warnings that point at the user's line, however deep in this package they are raised, and text that is safe to print."""

import re
import sys
import warnings
from types import FrameType

# Frames between the user's line and ours: our own, those of context managers, and those of modules that call ours.
_INSIDE = ("accelerate", "contextlib", "torch")


# Control characters, except newline and tab; bidirectional marks; line separators; and surrogates, which cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, limit: int | None = None) -> str:
    """Return text of a file, another process or the environment in a form that is safe to print.

    Control characters become ``\\xNN`` or ``\\uNNNN``, except newlines and tabs. Text longer than `limit` ends with an ellipsis.
    """
    text = text if limit is None or len(text) <= limit else f"{text[:limit]}…"
    return _CONTROL.sub(lambda char: f"\\x{ord(char[0]):02x}" if char[0] <= "\xff" else f"\\u{ord(char[0]):04x}", text)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the first line outside this package."""
    depth, _ = outside()
    warnings.warn(message, category, stacklevel=depth)


def outside() -> tuple[int, FrameType]:
    """Return the frame of the user's line, and how far above the caller's it is."""
    depth, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        depth, frame = depth + 1, frame.f_back
    return depth, frame
