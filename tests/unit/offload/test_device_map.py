"""Device maps: computed, cleaned, checked."""

import logging

import pytest
import torch
from torch import nn

from accelerate.offload.device_map import (
    check_device_map,
    clean_device_map,
    fallback_allocate,
    infer_auto_device_map,
)
from accelerate.offload.sizes import compute_module_sizes


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)  # 64 bytes
        self.norm = nn.BatchNorm1d(4)  # 72 bytes
        self.linear2 = nn.Linear(4, 5)  # 100 bytes


def _tied():
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("emb", "mid", "head")})
    model["head"].weight = model["emb"].weight
    return model


def test_devices_fill_in_order_and_the_first_keeps_room_for_the_largest_layer():
    model = _Net()
    assert infer_auto_device_map(model, {0: 236, "cpu": 1000}) == {"": 0}
    assert infer_auto_device_map(model, {0: 200, "cpu": 1000}) == {"linear1": 0, "norm": "cpu", "linear2": "cpu"}
    assert infer_auto_device_map(model, {0: 200, 1: 72, "cpu": 1000}) == {"linear1": 0, "norm": 1, "linear2": "cpu"}


def test_what_fits_nowhere_goes_to_disk():
    assert infer_auto_device_map(_Net(), {0: 0, "cpu": 0}, offload_buffers=True) == {"": "disk"}


def test_blocks_stay_whole_when_asked():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    budget = {0: 200, 1: 1000}
    assert infer_auto_device_map(model, budget) == {"0.0": 0, "0.1": 1, "1": 1}
    assert infer_auto_device_map(model, budget, no_split_module_classes="Sequential") == {"": 1}


def test_tied_modules_go_together():
    model = nn.ModuleDict({"emb": _tied()["emb"], "x": nn.Linear(4, 4, bias=False), "y": nn.Linear(4, 4, bias=False)})
    model["head"] = nn.Linear(4, 4, bias=False)
    model["head"].weight = model["emb"].weight
    device_map = infer_auto_device_map(model, {0: 128, "cpu": 1000}, clean_result=False)
    assert device_map == {"emb": 0, "head": 0, "x": "cpu", "y": "cpu"}


def test_a_tied_block_is_opened_so_that_only_the_shared_part_comes_along():
    model = _tied()
    model["head"] = nn.Sequential(model["head"], nn.Linear(20, 20))
    device_map = infer_auto_device_map(model, {0: 1680 + 64, 1: 64, "cpu": 10**5}, clean_result=False)
    assert device_map["emb"] == device_map["head.0"] == 0
    assert device_map["head.1"] == "cpu"


def test_tensors_and_uncleaned_maps():
    model = _Net()
    model.scale = nn.Parameter(torch.ones(1))
    device_map = infer_auto_device_map(model, {"cpu": 1000}, clean_result=False)
    assert device_map == dict.fromkeys(["scale", "linear1", "norm", "linear2"], "cpu")


def test_fallback_gives_an_empty_device_something_deeper():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(2, 2), nn.Linear(10, 10)))
    budget = {0: 500, "cpu": 10**4}
    assert infer_auto_device_map(model, budget) == {"": "cpu"}
    device_map = infer_auto_device_map(model, budget, fallback_allocation=True)
    assert device_map["1.0"] == 0 and device_map["0"] == "cpu"


def test_fallback_allocate_opens_modules_and_leaves_the_list_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2)))
    waiting = list(model.named_children())
    name, module, rest = fallback_allocate(waiting, compute_module_sizes(model), 30)
    assert (name, module) == ("1.1", model[1][1])
    assert [other for other, _ in rest] == ["0", "1.0"]
    assert [other for other, _ in waiting] == ["0", "1"]
    assert fallback_allocate(waiting, compute_module_sizes(model), 30, ["Sequential"])[0] is None


def test_buffers_that_stay_behind_are_warned_about():
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(100), nn.BatchNorm1d(100))
    with pytest.warns(UserWarning, match="1616 bytes of buffers"):
        infer_auto_device_map(model, {0: 1000, "cpu": 10**6})
    infer_auto_device_map(model, {0: 1000, "cpu": 10**6}, offload_buffers=True)


def test_verbose_prints_and_too_small_devices_are_logged(capsys, caplog):
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(_Net(), {0: 10, "cpu": 1000}, offload_buffers=True, verbose=True)
    assert "Putting linear1" in capsys.readouterr().out
    assert "0: 164 bytes required" in caplog.text


def test_clean_device_map_merges_by_name_not_by_text():
    assert clean_device_map({"a.b": 0, "a.c": 0, "ab": 1}) == {"ab": 1, "a": 0}
    assert clean_device_map({"a.b.x": 0, "a.b.y": 0, "a.c": 1}) == {"a.c": 1, "a.b": 0}
    assert clean_device_map({"a": 0, "b": 0}) == {"": 0}
    assert clean_device_map({}) == {}


def test_check_device_map_names_what_is_missing_and_warns_of_strangers():
    model = _Net()
    check_device_map(model, {"": 0})
    with pytest.raises(ValueError, match="norm.running_mean"):
        check_device_map(model, {"linear1": 0, "linear2": 0})
    with pytest.warns(UserWarning, match="stranger"):
        check_device_map(model, {"linear1": 0, "norm": 0, "linear2": 0, "stranger": 0})
