"""No option of the launcher is set while a plugin is built, whatever started these tests."""

import pytest

from unit.conftest import fake_deepspeed
from unit.launch.conftest import found_or_refused, no_devices, parse, plan
from unit.launch.runners.conftest import fake_package, written

__all__ = ["fake_deepspeed", "fake_package", "found_or_refused", "no_devices", "parse", "plan", "written"]


@pytest.fixture(autouse=True)
def no_variables(place):
    """Every test runs in an empty directory, without variables of a launch."""
