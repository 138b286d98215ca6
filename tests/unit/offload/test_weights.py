"""Where the tensors of an offloaded model are: reports, and state dicts."""

import logging

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import cpu_offload, cpu_offload_with_hook, dispatch_model, init_empty_weights
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from accelerate.offload.weights import DeviceMapReport, Place, get_state_dict_offloaded_model
from accelerate.utils import device_map_report


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 4)  # 80 bytes
        self.thin = nn.Linear(4, 1, bias=False)  # 16 bytes
        self.register_buffer("table", torch.zeros(3))  # 12 bytes


def _model():
    return nn.Sequential(_Block(), nn.Linear(4, 4), _Block())


def _only(model):
    (place,) = device_map_report(model).places
    return place


def _index(state, folder):
    save_file({name: value.detach().clone() for name, value in state.items()}, folder / "x.safetensors")
    return {name: {"safetensors_file": str(folder / "x.safetensors"), "dtype": "float32"} for name in state}


def test_a_plain_model_is_where_it_is_and_the_report_a_table():
    report = device_map_report(_model())
    assert report.places == (Place("cpu", "there", "cpu", 272, 24),)
    head, row = str(report).splitlines()
    columns = ["device", "parameters", "buffers", "kept between forwards", "runs on"]
    assert [cell.strip() for cell in head.split("  ") if cell] == columns
    assert row.split() == ["cpu", "272", "bytes", "24", "bytes", "there", "cpu"]
    assert device_map_report(nn.ReLU()) == DeviceMapReport((), ())


def test_weights_on_disk_are_reported_by_the_kind_of_file_without_reading(tmp_path):
    model = _model()
    index = _index({f"2.{name}": value for name, value in model[2].state_dict().items()}, tmp_path)
    dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_index=index)
    # Buffers stay in the modules unless they are offloaded too.
    places = (Place("cpu", "there", "cpu", 176, 24), Place("disk", "safetensors", "cpu", 96, 0))
    assert device_map_report(model).places == places
    model = _model()
    dispatch_model(model, {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path, offload_buffers=True)
    for file in tmp_path.iterdir():
        file.unlink()
    disk, _ = device_map_report(model).places
    assert disk == Place("disk", ".dat files", "cpu", 96, 12)


def test_the_device_that_runs_a_module_is_that_of_its_hook_or_of_one_further_up():
    assert _only(cpu_offload(_model(), "meta")) == Place("cpu", "host memory", "meta", 272, 24)
    offloaded = cpu_offload(_model(), "cpu", preload_module_classes=["_Block"])
    kept = next(place for place in device_map_report(offloaded).places if place.kept == "host memory")
    assert (kept.runs_on, kept.parameters) == ("cpu", 272)
    whole, _ = cpu_offload_with_hook(_model(), "meta")
    assert _only(whole) == Place("cpu", "there", "meta", 272, 24)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = {name: value.clone() for name, value in model[0].state_dict().items()}
    add_hook_to_module(model[0], ModelHook())
    add_hook_to_module(model[0], AlignDevicesHook("cpu", offload=True, weights_map=weights), append=True)
    kept, there = device_map_report(model).places
    assert (kept.kept, kept.parameters, there.kept, there.parameters) == ("host memory", 80, "there", 80)


def test_a_tied_weight_counts_once_wherever_it_is(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    assert _only(model).parameters == 64
    dispatch_model(
        model, {"": "disk"}, offload_index=_index({"0.weight": model[0].weight}, tmp_path), force_hooks=True
    )
    assert (_only(model).kept, _only(model).parameters) == ("safetensors", 64)


def test_tensors_without_data_are_named(caplog):
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    report = device_map_report(model)
    assert report == DeviceMapReport((), ("0.bias", "0.weight", "1.weight"))
    assert str(report).endswith("Without data (on meta, and no hook has them): 0.bias, 0.weight, 1.weight")
    with caplog.at_level(logging.WARNING):
        get_state_dict_offloaded_model(model)
    assert "0.bias, 0.weight, 1.weight" in caplog.text
    # A hook that does not have the weight does not help; one that does, does.
    add_hook_to_module(model[1], AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(4, 4)}))
    model[0]._hf_hook = AlignDevicesHook("cpu", offload=True, weights_map={"bias": torch.ones(4)})
    assert device_map_report(model).without_data == ("0.weight",)
