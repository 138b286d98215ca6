"""Dispatching between nodes: processes of this machine that take themselves for two of them."""

import pytest


@pytest.mark.slow
def test_a_reader_per_node(launch):
    done = launch("readers_of_nodes.py", processes=4, cpu=True)
    assert done.stdout.count("ok check_") == 5
