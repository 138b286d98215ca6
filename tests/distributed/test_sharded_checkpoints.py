"""Checkpoints of models that torch spreads over ranks, written under one strategy and loaded under others.

Everything in a test runs in one set of processes, which form process groups of the sizes that are needed.
"""

import pytest

SCRIPT = "check_sharded_checkpoints.py"


@pytest.mark.slow
def test_other_strategies_and_numbers_of_ranks(launch):
    checks = [
        "each_strategy_reads_what_the_others_write",
        "a_file_per_rank",
        "a_rank_that_fails_stops_all_before_anything_changes",
        "public_functions",
        "one_rank_that_cannot_begin_or_merge_keeps_nobody_waiting",
        "what_does_not_fit_is_refused_or_left_out",
    ]
    printed = launch(SCRIPT, *checks, processes=3, cpu=True).stdout
    assert all(f"ok {check}" in printed for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tp"])
def test_the_wide_matrix(launch, writer):
    done = launch(SCRIPT, "the_wide_matrix", processes=4, cpu=True, environment={"WRITER": writer})
    assert "ok the_wide_matrix" in done.stdout


@pytest.mark.slow
def test_meshes_of_two_dims(launch):
    assert "ok meshes_of_two_dims" in launch(SCRIPT, "meshes_of_two_dims", processes=4, cpu=True).stdout
