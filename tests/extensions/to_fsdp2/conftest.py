"""Fixtures of the tests of commands."""

from unit.commands.conftest import accelerate, clean, refused

__all__ = ["accelerate", "clean", "refused"]
