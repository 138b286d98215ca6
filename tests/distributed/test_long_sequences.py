"""Sequences shared by ranks (context and sequence parallelism), on two processes and four."""

import pytest


def test_shared_sequences_equal_whole_ones(launch):
    done = launch("check_long_sequences.py", processes=2)
    assert "ok all" in done.stdout and done.stdout.count("ok ") == 13


@pytest.mark.slow
def test_four_ranks_and_replicas(launch):
    done = launch("check_long_sequences.py", processes=4)
    assert "ok replicas_of_shared_sequences" in done.stdout and done.stdout.count("ok ") == 14
