"""Every test runs on a machine without devices."""

from unit.launch.conftest import no_devices

__all__ = ["no_devices"]
