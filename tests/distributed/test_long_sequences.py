"""Sequences shared by ranks (context and sequence parallelism), on two processes and four."""

import pytest

QUICK = (
    *("attention_equals_the_whole", "half_precision_is_near", "buffers_come_back", "bad_input_is_refused_together"),
    *("facade_trains_the_same", "uneven_losses_are_exact", "teachers_follow", "models_that_cannot_are_refused"),
)


def test_shared_sequences_equal_whole_ones(launch):
    pytest.importorskip("transformers")
    assert launch("check_long_sequences.py", *QUICK).stdout.count("ok ") == len(QUICK) + 1


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "checks"), [(2, 10), (4, 11)])
def test_four_ranks_replicas_and_compiled_models(launch, processes, checks):
    pytest.importorskip("transformers")
    assert launch("check_long_sequences.py", processes=processes).stdout.count("ok ") == checks + 1
