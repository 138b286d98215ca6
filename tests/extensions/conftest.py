"""Fixtures of unit tests and of tests that launch processes, for the tests of extensions."""

from distributed.conftest import interruptible, launch
from unit.conftest import default_file, place, programs

__all__ = ["default_file", "interruptible", "launch", "place", "programs"]
