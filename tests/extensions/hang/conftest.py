"""Fixtures of commands."""

from unit.commands.conftest import accelerate

__all__ = ["accelerate"]
