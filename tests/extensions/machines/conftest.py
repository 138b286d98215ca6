"""Fixtures of the tests of launches."""

from unit.launch.conftest import found_or_refused, gpus, no_devices, parse, plan

__all__ = [
    "found_or_refused",
    "gpus",
    "no_devices",
    "parse",
    "plan",
]
