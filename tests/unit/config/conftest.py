"""No option of the launcher is set while a plugin is built, whatever started these tests."""

import pytest


@pytest.fixture(autouse=True)
def no_variables(place):
    """Every test of a plugin runs in a separate place."""
