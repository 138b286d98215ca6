"""Fixtures of the tests of commands and of object stores."""

from unit.checkpoint.conftest import base, memory, s3, s3_server
from unit.commands.conftest import accelerate, clean, refused

__all__ = ["accelerate", "base", "clean", "memory", "refused", "s3", "s3_server"]
