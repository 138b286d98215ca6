"""Warnings that point at the user's line, however deep in this package they are raised."""

import re
import sys
import warnings

# Frames between the user's line and ours: our own, those of context managers, and those of modules that call ours.
_INSIDE = ("accelerate", "contextlib", "torch")


def printable(text: str, limit: int | None = None) -> str:
    """Return a text of unknown origin with its control characters as `\\xNN`, except newlines and tabs, and cut at a length."""
    text = text if limit is None or len(text) <= limit else f"{text[:limit]}…"
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the first line outside this package."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)
