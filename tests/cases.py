"""A table of cases for a test."""

import pytest


def cases(names, *rows, ids=None):
    """Run a test once for each row; see `pytest.mark.parametrize`."""
    return pytest.mark.parametrize(names, rows, ids=ids)
