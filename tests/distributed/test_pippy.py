"""Pipelines of several processes return what one process does."""

import pytest

QUICK = ("batches_of_any_size", "structures", "inputs", "refused_at_first", "refused_at_calls")
PLAIN = (*QUICK, "activations", "again")


@pytest.mark.parametrize(
    ("processes", "checks"),
    [
        (2, (*QUICK, "bert")),
        pytest.param(2, ("activations", "again", "decoders", "t5"), marks=pytest.mark.slow),
        pytest.param(3, PLAIN, marks=pytest.mark.slow),
        pytest.param(4, (*PLAIN, "t5"), marks=pytest.mark.slow),
    ],
)
def test_pipelines(launch, processes, checks):
    pytest.importorskip("transformers")
    assert launch("check_pippy.py", *checks, processes=processes).stdout.count("ok ") == len(checks) + 1
