"""Which line of the user's program a thread is at."""

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_PACKAGES = ("site-packages" + os.sep, "dist-packages" + os.sep)


def call_site(frame: FrameType | None = None) -> str:
    """Return ``file:line in function`` of the user, outside of torch and this library, and of the script."""
    return describe(frame or sys._getframe(1))[0]


def describe(frame: FrameType) -> tuple[str, str]:
    """Return the call site of a stack, and the function called there."""
    inside: list[FrameType] = []
    site: FrameType | None = frame
    while site is not None and not is_users(site.f_code.co_filename):
        inside.append(site)
        site = site.f_back
    below = [f"{inner.f_globals.get('__name__', '?')}.{inner.f_code.co_name}" for inner in inside]
    if site is None:  # a script of this library's own
        return line_of(inside[-1]), below[0]
    caller: FrameType | None = site
    while caller is not None and (_is_installed(file := caller.f_code.co_filename) or not is_users(file)):
        caller = caller.f_back
    line = line_of(site) if caller in (None, site) else f"{line_of(site)}, called from {line_of(caller)}"
    return line, " > ".join(dict.fromkeys((below[-1], below[0]))) if below else ""


def line_of(frame: FrameType) -> str:
    """Return ``file:line in function``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


@functools.cache
def is_users(file: str) -> bool:
    """Return whether a file is outside of torch, this library and Python's own; one of another package may be a user's."""
    standard = file.startswith("<frozen") or (file.startswith(_LIBRARY) and not _is_installed(file))
    return not (standard or file.startswith((_OURS, _TORCH)))


@functools.cache
def _is_installed(file: str) -> bool:
    return any(part in file for part in _PACKAGES)
