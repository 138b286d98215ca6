"""Every test runs in an empty directory, on a machine without devices."""

from unit.commands.conftest import clean
from unit.launch.conftest import no_devices

__all__ = ["clean", "no_devices"]
