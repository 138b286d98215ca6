"""Pipelines of several processes return what one process does."""

import pytest

PLAIN = (
    *("batches_of_any_size", "structures", "inputs", "activations"),
    *("refused_at_first", "refused_at_calls", "again"),
)


def test_pipelines(launch):
    pytest.importorskip("transformers")
    assert launch("check_pippy.py", *PLAIN, "bert").stdout.count("ok ") == len(PLAIN) + 2


@pytest.mark.slow
def test_models_of_transformers(launch):
    pytest.importorskip("transformers")
    assert launch("check_pippy.py", "gpt2", "llama", "t5").stdout.count("ok ") == 4


@pytest.mark.slow
@pytest.mark.parametrize("processes", [3, 4])
def test_more_stages(launch, processes):
    pytest.importorskip("transformers")
    checks = PLAIN if processes == 3 else (*PLAIN, "t5")
    assert launch("check_pippy.py", *checks, processes=processes).stdout.count("ok ") == len(checks) + 1
