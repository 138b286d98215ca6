"""The settings of context and sequence parallelism."""

import pytest

from accelerate.extensions.sequence.config import DeepSpeedSequenceParallelConfig
from accelerate.parallelism_config import ParallelismConfig


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


def test_a_handler_of_another_dimension_is_refused():
    with pytest.raises(ValueError, match="must be a TorchContextParallelConfig"):
        ParallelismConfig(cp_size=2, cp_handler=DeepSpeedSequenceParallelConfig())
