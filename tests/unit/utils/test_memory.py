"""Recognising exhausted memory; the old home."""

import importlib
import sys

import pytest
import torch

from accelerate.utils import memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed"), True),
        (ValueError("CUDA out of memory"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_exhausted_memory_is_recognised(error, expected):
    assert memory.should_reduce_batch_size(error) is expected


def test_the_old_home_warns():
    sys.modules.pop("accelerate.memory_utils", None)
    with pytest.warns(FutureWarning, match="accelerate.utils.memory"):
        old = importlib.import_module("accelerate.memory_utils")
    assert old.find_executable_batch_size is memory.find_executable_batch_size
