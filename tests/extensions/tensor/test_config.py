"""The settings of tensor parallelism."""

import warnings

import pytest

from accelerate.extensions.tensor import config
from accelerate.extensions.tensor.config import TorchTensorParallelConfig, TorchTensorParallelPlugin
from accelerate.parallelism_config import ParallelismConfig


def test_tensor_parallel_needs_no_transformers_or_a_recent_one(monkeypatch):
    monkeypatch.setattr(config, "is_transformers_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TorchTensorParallelConfig().enable_async_tp is False
    with pytest.warns(UserWarning, match="enable_async_tp has no effect"):
        TorchTensorParallelConfig(enable_async_tp=True)
    monkeypatch.setattr(config, "is_transformers_available", lambda: True)
    monkeypatch.setattr(config, "compare_versions", lambda *arguments: arguments == ("transformers", "<", "4.52.0"))
    with pytest.raises(ValueError, match="transformers 4.52.0 or later"):
        TorchTensorParallelConfig()
    with pytest.raises(ValueError, match="tp_size is"):
        TorchTensorParallelPlugin("0")
    assert TorchTensorParallelPlugin("2").tp_size == 2


def test_a_handler_of_another_class_is_refused():
    with pytest.raises(ValueError, match="tp_handler is a int"):
        ParallelismConfig(tp_size=2, tp_handler=5)
