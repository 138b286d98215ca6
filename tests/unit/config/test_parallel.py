"""The options of each kind of parallelism."""

import warnings

import pytest

from accelerate.config import parallel
from accelerate.config.parallel import (
    DeepSpeedSequenceParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)


def test_tensor_parallel_needs_no_transformers_or_a_recent_one(monkeypatch):
    monkeypatch.setattr(parallel, "is_transformers_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TorchTensorParallelConfig().enable_async_tp is False
    with pytest.warns(UserWarning, match="enable_async_tp has no effect"):
        TorchTensorParallelConfig(enable_async_tp=True)
    monkeypatch.setattr(parallel, "is_transformers_available", lambda: True)
    monkeypatch.setattr(parallel, "compare_versions", lambda *arguments: arguments == ("transformers", "<", "4.52.0"))
    with pytest.raises(ValueError, match="transformers 4.52.0 or later"):
        TorchTensorParallelConfig()
    with pytest.raises(ValueError, match="tp_size is"):
        TorchTensorParallelPlugin("0")
    assert TorchTensorParallelPlugin("2").tp_size == 2


def test_sequence_parallel_needs_the_common_length(monkeypatch):
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_SP_SEQ_LENGTH"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    assert DeepSpeedSequenceParallelConfig(4, False).sp_seq_length == 4
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "512")
    assert DeepSpeedSequenceParallelConfig().sp_seq_length is None
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    assert DeepSpeedSequenceParallelConfig().sp_seq_length == 512
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "long")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_SP_SEQ_LENGTH is 'long'"):
        DeepSpeedSequenceParallelConfig()


@pytest.mark.parametrize("name", ["eager", "flex_attention", "flash_attention_9", "someone/attention", "flash-attn2"])
def test_sequence_parallel_refuses_other_attention(name):
    with pytest.raises(ValueError, match=f"Invalid sp_attn_implementation: '{name}'.*sdpa"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation=name)
