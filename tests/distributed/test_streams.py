"""Streams across processes: divided once, ended together, and the plan says so."""

import pytest


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_streams_are_divided_once_and_end_together(launch, processes):
    pytest.importorskip("datasets")
    done = launch("check_streams.py", processes=processes)
    assert "ok all" in done.stdout


def test_a_lost_process_ends_the_others(launch):
    done = launch("check_streams.py", "lost_process", succeeds=False)
    assert "survived" not in done.stdout
