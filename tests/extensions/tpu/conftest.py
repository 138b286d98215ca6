"""Fixtures of the tests of launches, runners and commands."""

from unit.commands.conftest import accelerate, clean, refused
from unit.launch.conftest import found_or_refused, gpus, no_devices, parse, plan
from unit.launch.runners.conftest import fake_package, written

__all__ = [
    "accelerate",
    "clean",
    "fake_package",
    "found_or_refused",
    "gpus",
    "no_devices",
    "parse",
    "plan",
    "refused",
    "written",
]
