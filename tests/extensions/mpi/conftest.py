"""Fixtures of the tests of launches and runners."""

from unit.launch.conftest import found_or_refused, gpus, no_devices, parse, plan
from unit.launch.runners.conftest import fake_package, written

__all__ = [
    "fake_package",
    "found_or_refused",
    "gpus",
    "no_devices",
    "parse",
    "plan",
    "written",
]
