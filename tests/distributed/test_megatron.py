"""Megatron core, where it is installed: `make test-megatron` has a separate environment. What it asks of GPUs is done by the host."""

import importlib
import inspect

import pytest

import megatron_fake

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")


def test_engines(launch):
    launch("several.py", "check_megatron.py", limit_s=600)


@pytest.mark.parametrize(("path", "names"), megatron_fake.NAMES.items())
def test_the_stand_in_has_cores_names(path, names):
    """What the unit tests record is what core takes."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(f"megatron.core.{module}"), name)
    assert not set(names.split()) - inspect.signature(kind).parameters.keys()


@pytest.mark.slow
def test_tensor_and_pipeline_parallelism_together(launch):
    launch("several.py", "check_megatron.py", "four_ranks", processes=4, limit_s=600)
