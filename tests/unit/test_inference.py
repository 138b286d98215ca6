"""Pipeline inference: cutting a model and running micro-batches."""

import pytest
import torch
from torch import nn

import accelerate.inference as inference


class _Layers(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_hold_consecutive_layers_and_none_is_empty(stages):
    device_map = inference.generate_device_map(_Layers(), stages)
    assert sorted(set(device_map.values())) == list(range(stages))
    assert list(device_map.values()) == sorted(device_map.values())
    assert list(device_map) == [*(f"layers.{i}" for i in range(6)), "head"]


def test_one_process_needs_no_cut_and_budgets_are_respected():
    assert set(inference.generate_device_map(_Layers(), 1).values()) == {"cpu"}
    assert set(inference.generate_device_map(_Layers(), 2, max_memory={0: 0, 1: 10**4}).values()) == {1}


def test_too_many_stages_are_refused():
    with pytest.raises(ValueError, match="cannot be cut into 9 stages"):
        inference._automatic_split(_Layers(), 9, None)
    assert inference._automatic_split(_Layers(), 2, None) == ["layers.3"]


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((torch.ones(3, 2),), {}, 3),
        ((), {"a": 1, "x": [torch.ones(4)]}, 4),
        ((1, torch.tensor(1.0)), {}, None),
        (None, None, None),
    ],
)
def test_the_batch_size_is_that_of_the_first_tensor(args, kwargs, size):
    assert inference.find_pippy_batch_size(args, kwargs) == size


class _State:
    device = torch.device("cpu")
    num_processes = 2
    process_index = 0


def test_the_first_process_pads_and_the_output_loses_the_padding(monkeypatch):
    monkeypatch.setattr(inference, "PartialState", _State)
    seen = []

    def step(x):
        seen.append(x)
        return x * 2

    output = inference.pippy_forward(step, 2, False, torch.ones(3, 1))
    assert seen[0].shape == (4, 1) and output.shape == (3, 1)
    with pytest.raises(ValueError, match="no tensor"):
        inference.pippy_forward(step, 2, False)


def test_other_processes_bring_no_inputs_and_share_the_output_on_request(monkeypatch):
    monkeypatch.setattr(inference, "PartialState", type("State", (_State,), {"process_index": 1}))
    monkeypatch.setattr(inference, "copy_tensor_to_devices", lambda tensor: tensor + 1)
    assert inference.pippy_forward(lambda: torch.zeros(2), 2, False).sum() == 0
    assert inference.pippy_forward(lambda: torch.zeros(2), 2, True).sum() == 2


def test_a_pipeline_needs_processes(monkeypatch):
    monkeypatch.setattr(inference, "PartialState", _State)
    with pytest.raises(ValueError, match="accelerate launch"):
        inference.prepare_pippy(_Layers(), example_args=(torch.ones(2, 4),))
