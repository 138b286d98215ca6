"""Fixtures of unit tests and of tests that launch processes, for the tests of extensions."""

from distributed.conftest import interruptible, launch
from extensions.configure.conftest import at_random, scripted
from unit.checkpoint.conftest import base, memory, s3, s3_server
from unit.commands.conftest import accelerate, refused
from unit.conftest import default_file, place, programs
from unit.launch.conftest import found_or_refused, gpus, parse, plan
from unit.launch.runners.conftest import fake_package, written

__all__ = ["accelerate", "at_random", "base", "default_file", "fake_package", "found_or_refused", "gpus"]
__all__ += ["interruptible", "launch", "memory", "parse", "place", "plan", "programs", "refused", "s3", "s3_server"]
__all__ += ["scripted", "written"]
