"""Checkpoints of models that torch spreads over ranks, written under one strategy and loaded under others.

Everything in a test runs in one set of processes, which form process groups of the sizes that are needed.
"""

import pytest

SCRIPT = "check_sharded_checkpoints.py"


@pytest.mark.slow
def test_other_strategies_and_numbers_of_ranks(launch):
    printed = launch(SCRIPT, processes=3, cpu=True).stdout
    assert printed.count("ok ") == 5, printed


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tp"])
def test_the_wide_matrix(launch, writer):
    done = launch(SCRIPT, "the_wide_matrix", processes=4, cpu=True, environment={"WRITER": writer})
    assert "ok the_wide_matrix" in done.stdout


@pytest.mark.slow
def test_meshes_of_two_dims(launch):
    assert "ok meshes_of_two_dims" in launch(SCRIPT, "meshes_of_two_dims", processes=4, cpu=True).stdout
