"""Ulysses without other processes: heads that can be dealt out, settings that are checked."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.config.parallel import DeepSpeedSequenceParallelConfig
from accelerate.parallel import sequence


class Mesh:
    mesh_dim_names = ("sp",)

    def __getitem__(self, name):
        return self

    def get_group(self):
        return "the group"

    def size(self):
        return 4

    def get_local_rank(self):
        return 1


class PreTrainedModel(nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa", **config)

    def forward(self, input_ids, position_ids=None):
        return input_ids


def stub(handler=None):
    layout = SimpleNamespace(sp_size=4, sp_handler=handler)
    return SimpleNamespace(parallelism_config=layout, torch_device_mesh=Mesh(), _cp_context=None)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (12, 6, 3), (5, 5, 1)]
)
def test_heads_that_fit(heads, key_heads, size):
    sequence.check_heads(heads, key_heads, size)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "said"),
    [
        (6, 6, 4, r"6 = 1 x 4 \+ 2.*one of \[1, 2, 3, 6\]"),
        (2, 2, 4, r"2 = 0 x 4 \+ 2.*one of \[1, 2\]"),
        (12, 6, 4, r"6 key and value heads.*one of \[1, 2, 3, 6, 12\]"),
    ],
)
def test_heads_that_do_not(heads, key_heads, size, said):
    with pytest.raises(ValueError, match=said):
        sequence.check_heads(heads, key_heads, size)


def test_prepare_asks_the_configuration():
    accelerator = stub()
    fits = PreTrainedModel(num_attention_heads=8, num_key_value_heads=2)
    assert sequence.prepare(accelerator, "sp", (fits, "loader")) == (fits, "loader")
    assert isinstance(accelerator._cp_context, sequence.SequenceRegion)
    assert len(fits._forward_pre_hooks) == 2
    with pytest.raises(ValueError, match="PreTrainedModel has 6 heads"):
        sequence.prepare(stub(), "sp", (nn.Sequential(PreTrainedModel(num_attention_heads=6)),))
    nested = PreTrainedModel(num_attention_heads=8)
    nested.config.get_text_config = lambda: SimpleNamespace(num_attention_heads=6)
    with pytest.raises(ValueError, match="6 heads"):
        sequence.prepare(stub(), "sp", (nested,))
    bare = stub()
    bare.torch_device_mesh = None
    with pytest.raises(ValueError, match="no dimension 'sp'"):
        sequence.prepare(bare, "sp", ())


def test_settings_without_use_here():
    with pytest.raises(ValueError, match="flash_attention_2"):
        sequence.prepare(stub(DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")), "sp", ())
    with pytest.warns(UserWarning, match="sp_seq_length=64 has no effect"):
        sequence.prepare(stub(DeepSpeedSequenceParallelConfig(sp_seq_length=64)), "sp", ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator = stub(DeepSpeedSequenceParallelConfig(sp_seq_length=64, sp_seq_length_is_variable=False))
        sequence.prepare(accelerator, "sp", ())
    region = accelerator._cp_context
    assert region._odd_length(64) is None and "sp_seq_length=64" in region._odd_length(32)
    free = sequence.SequenceRegion(Mesh())
    assert free._odd_length(12) is None
    assert "6 = 1 x 4 + 2. Pad it by 2 to 8, or cut it to 4" in free._odd_length(6)


def test_tensors_without_heads_are_refused():
    flat = torch.ones(2, 4, 8)
    with pytest.raises(ValueError, match=r"\(2, 4, 8\)"):
        sequence.ulysses(flat, flat, flat, 0.0, False, None, False, SimpleNamespace(group=None, size=2))
