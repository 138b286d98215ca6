"""Storage of tensors, and state dicts for safetensors."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accelerate.modules import unwrap as tensors


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight


def test_tied_tensors_are_kept_under_their_first_name():
    state = Tied().state_dict()
    assert tensors.shared_tensor_names({**state, "c": 3}) == [["a.weight", "b.weight"]]
    with pytest.raises(ValueError, match="'extra'.*int"):  # the kind that safetensors raises
        tensors.clean_state_dict_for_safetensors({"extra": 3})
    cleaned = tensors.clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["a.weight", "a.bias", "b.bias"]
    assert list(state) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_overlapping_tensors_are_all_kept(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    cleaned = tensors.clean_state_dict_for_safetensors({"all": base, "row": base[1], "turned": base.t()})
    save_file(cleaned, tmp_path / "file")
    loaded = load_file(tmp_path / "file")
    assert torch.equal(loaded["row"], base[1]) and torch.equal(loaded["turned"], base.t())
