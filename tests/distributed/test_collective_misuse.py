"""``save_state`` and ``load_state`` on some ranks only, or with different arguments: an error instead of a hang."""

import signal

import pytest

from distributed.conftest import started_by_hand

SCRIPT = "check_misuse.py"


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, ["saves_on_main", "waits_for_slow_main"]),
        pytest.param(3, ["saves_on_main", "waits_for_two_that_wait_for_each_other"], marks=pytest.mark.slow),
    ],
)
def test_misuse_is_an_error_within_seconds_and_slow_ranks_are_waited_for(launch, processes, cases):
    done = launch(SCRIPT, *cases, processes=processes)
    assert done.stdout.splitlines().count("ok all") == processes


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_is_not_waited_for(tmp_path):
    processes = started_by_hand(SCRIPT, "dies_while_saving", size=3, cwd=tmp_path)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], outputs
    assert "rank 0 heard after" in outputs[0] and "rank 2 heard after" in outputs[2]


@pytest.mark.slow
def test_a_rank_that_outlives_the_one_with_the_store_ends_in_peace(tmp_path):
    first, second = started_by_hand(SCRIPT, "ends_after_main", size=2, cwd=tmp_path)
    outputs = [first.communicate(timeout=120)[0]]
    (tmp_path / "main-has-ended").touch()
    outputs.append(second.communicate(timeout=120)[0])
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert "Connection was likely closed" not in "".join(outputs)
