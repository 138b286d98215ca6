"""Pipeline inference: where a model is cut, and what all ranks have to agree about."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import accelerate.extensions.inference.pippy as inference
from accelerate.extensions.pipeline import balance


class _Layers(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])
        self.head = nn.Linear(4, 2)


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.drop = nn.Dropout()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.ones(2))
        self.first = nn.Dropout()
        self.blocks = nn.ModuleList([_Block(4), _Block(8), _Block(4), _Block(4)])
        self.last = nn.Identity()


@pytest.mark.parametrize(("stages", "sizes"), [(2, [240, 280]), (3, [160, 160, 200]), (7, [80] * 6 + [40])])
def test_stages_hold_consecutive_layers_and_the_largest_is_as_small_as_can_be(stages, sizes):
    device_map = inference.generate_device_map(_Layers(), stages)
    assert list(device_map) == [*(f"layers.{i}" for i in range(6)), "head"]
    assert list(device_map.values()) == sorted(device_map.values())
    found = [0] * stages
    for name, stage in device_map.items():
        found[stage] += 40 if name == "head" else 80
    assert found == sizes


def test_a_map_names_every_tensor_and_classes_stay_whole():
    from accelerate.utils import check_device_map

    def starts(model, no_split):
        return [units[0].module for units in balance.even_stages(model, 3, no_split)[1:]]

    model = _Blocks()
    for no_split in (None, ["_Block"]):
        device_map = inference.generate_device_map(model, 3, no_split)
        check_device_map(model, device_map)
        assert ("blocks.1" in device_map) is (no_split is not None)
    assert {name: device_map[name] for name in ("start", "first", "last")} == {"start": 0, "first": 0, "last": 2}
    assert starts(model, ["_Block"]) == ["blocks.1", "blocks.2"]
    model._no_split_modules = ["_Block"]  # as models of transformers say it
    assert starts(model, None) == ["blocks.1", "blocks.2"]
    assert starts(model, []) != ["blocks.1", "blocks.2"]


def test_too_many_stages_are_refused():
    with pytest.raises(
        ValueError, match=r"_Layers cannot be cut into 9 stages.* 7 modules .*\(layers.0, .*, \.\.\.\)"
    ):
        inference.generate_device_map(_Layers(), 9)


def test_a_batch_goes_to_the_schedule_and_its_output_to_all_on_request():
    step = mock.Mock(return_value="output")
    step.__self__ = SimpleNamespace(num_chunks=2, to_all=lambda output: [output])
    assert inference.pippy_forward(step, 2, False, 1, x=2) == "output"
    assert inference.pippy_forward(step, 2, True) == ["output"]
    with pytest.raises(ValueError, match="num_chunks=3, but the pipeline was built for 2"):
        inference.pippy_forward(step, 3, False)
    assert step.mock_calls == [mock.call(1, x=2), mock.call()]


def test_ranks_that_differ_raise_on_all(monkeypatch):
    def check(everything, error=None):
        communicator = SimpleNamespace(gather_object=lambda mine: everything)
        monkeypatch.setattr(inference.comm, "current", lambda: communicator)
        inference._check_same_arguments({}, error)

    check([{"a": 1}, {"a": 1}])
    with pytest.raises(ValueError, match="Rank 1 cannot build .* ValueError: no"):
        check([{"a": 1}, "ValueError: no"])
    with pytest.raises(KeyError, match="mine"):
        check(["KeyError: mine", {"a": 1}], KeyError("mine"))
    with pytest.raises(ValueError, match="a is 2 on rank 1 and 1 on rank 0"):
        check([{"a": 1}, {"a": 2}])


def test_a_pipeline_needs_processes():
    with pytest.raises(ValueError, match="accelerate launch"):
        inference.prepare_pippy(_Layers(), example_args=(torch.ones(2, 4),))
