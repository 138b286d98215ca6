"""Megatron core, where it is installed: `make test-megatron` has an environment of its own. What it asks of GPUs is done by the host."""

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")


def test_engines(launch):
    launch("several.py", "check_megatron.py", limit_s=600)


@pytest.mark.slow
def test_tensor_and_pipeline_parallelism_together(launch):
    launch("several.py", "check_megatron.py", "four_ranks", processes=4, limit_s=600)
