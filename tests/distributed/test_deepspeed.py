"""DeepSpeed, where it is installed: `make test-deepspeed` has an environment of its own, because importing it changes torch."""

import pytest

pytest.importorskip("deepspeed")


def test_engines(launch):
    done = launch("several.py", "check_deepspeed.py", limit_s=600)
    assert done.stdout.count("\nok check_") == 8


def test_another_number_of_ranks_loads(launch):
    launch("several.py", "check_deepspeed.py", "saved_by_all")
    launch("several.py", "check_deepspeed.py", "loaded_by_fewer", processes=1)


def test_shared_sequences(launch):
    pytest.importorskip("transformers")
    done = launch("several.py", "check_ulysses.py", limit_s=600)
    assert done.stdout.count("\nok check_") == 5


def test_shared_sequences_beside_data_parallelism(launch):
    pytest.importorskip("transformers")
    launch("several.py", "check_ulysses.py", "check_each_stage", processes=4, limit_s=600)
