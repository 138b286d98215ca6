"""Every test of a command runs in an empty directory."""

from unit.commands.conftest import clean

__all__ = ["clean"]
