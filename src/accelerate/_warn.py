"""Warnings that point at the user's line, however deep in this package they are raised."""

import sys
import warnings

# Frames between the user's line and ours: our own, those of context managers, and those of modules that call ours.
_INSIDE = ("accelerate", "contextlib", "torch")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the first line outside this package."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)
