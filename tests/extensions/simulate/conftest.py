"""Fixtures of the tests of runners."""

from unit.launch.conftest import gpus, no_devices, parse, plan

__all__ = ["gpus", "no_devices", "parse", "plan"]
