"""Fixtures of the tests of launches, runners and interviews."""

from unit.commands.config.conftest import at_random, machine, scripted
from unit.launch.conftest import found_or_refused, gpus, no_devices, parse, plan
from unit.launch.runners.conftest import fake_package, written

__all__ = [
    "at_random",
    "fake_package",
    "found_or_refused",
    "gpus",
    "machine",
    "no_devices",
    "parse",
    "plan",
    "scripted",
    "written",
]
