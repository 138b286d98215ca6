"""Reports of where the tensors of a model are."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate.big_modeling import cpu_offload, cpu_offload_with_hook, dispatch_model, init_empty_weights
from accelerate.hooks import AlignDevicesHook, CpuOffload, ModelHook, add_hook_to_module
from accelerate.offload import placement
from accelerate.offload.weights import DeviceMapReport, Place, device_map_report
from accelerate.utils import device_map_report as public


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 4)  # 80 bytes
        self.thin = nn.Linear(4, 1, bias=False)  # 16 bytes
        self.register_buffer("table", torch.zeros(3))  # 12 bytes

    def forward(self, x):
        return self.thin(self.wide(x)).expand(-1, 4) + self.table[0]


def _model():
    return nn.Sequential(_Block(), nn.Linear(4, 4), _Block())


def _only(model):
    (place,) = device_map_report(model).places
    return place


def test_a_plain_model_is_where_it_is():
    assert public is device_map_report
    assert _only(_model()) == Place("cpu", "there", 272, 24, 7, runs_on=("cpu",))
    assert device_map_report(nn.ReLU()) == DeviceMapReport((), ())


def test_a_report_is_a_table():
    report = device_map_report(_model())
    head, row = str(report).splitlines()
    assert [cell.strip() for cell in head.split("  ") if cell] == [
        *("device", "parameters", "buffers", "modules", "kept between forwards", "runs on")
    ]
    assert row.split() == ["cpu", "272", "bytes", "24", "bytes", "7", "there", "cpu"]
    assert len(str(device_map_report(nn.ReLU())).splitlines()) == 1


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="model is a dict, .*one model at a time"):
        device_map_report({"unet": _model()})


def test_what_is_on_disk_is_told_by_the_kind_of_file(tmp_path):
    model = _model()
    save_file(
        {f"2.{name}": value.clone() for name, value in model[2].state_dict().items()}, tmp_path / "x.safetensors"
    )
    index = {
        f"2.{name}": {
            "safetensors_file": str(tmp_path / "x.safetensors"),
            "weight_name": f"2.{name}",
            "dtype": "float32",
        }
        for name in model[2].state_dict()
    }
    dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_index=index)
    there, disk = device_map_report(model).places
    # Buffers stay in the modules unless they are offloaded too.
    assert there == Place("cpu", "there", 176, 24, 5, runs_on=("cpu",))
    assert disk == Place("disk", "safetensors", 96, 0, 2, runs_on=("cpu",))

    model = _model()
    dispatch_model(model, {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path, offload_buffers=True)
    disk, _ = device_map_report(model).places
    assert disk == Place("disk", ".dat files", 96, 12, 3, runs_on=("cpu",))


def test_nothing_is_read_for_a_report(tmp_path):
    model = _model()
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, force_hooks=True)
    for file in tmp_path.iterdir():
        file.unlink()
    places = {place.device: place for place in device_map_report(model).places}
    assert places["disk"].parameters == 272 and places["cpu"].buffers == 24


def test_weights_in_host_memory_visit_the_device_that_runs_them():
    model = _model()
    cpu_offload(model, "meta")
    place = _only(model)
    assert (place.device, place.kept, place.parameters, place.runs_on) == ("cpu", "host memory", 272, ("meta",))


def test_a_module_that_is_loaded_as_a_whole_is_governed_from_above():
    model = _model()
    cpu_offload(model, "cpu", preload_module_classes=["_Block"])
    kept = next(place for place in device_map_report(model).places if place.kept == "host memory")
    assert (kept.runs_on, kept.parameters) == (("cpu",), 272)
    whole, _ = cpu_offload_with_hook(_model(), "meta")
    place = _only(whole)
    assert (place.device, place.kept, place.runs_on) == ("cpu", "there", ("meta",))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (1, "cuda:1"),
        ("cuda", "cuda:0"),
        (torch.device("cuda:1"), "cuda:1"),
        (torch.device("cpu:0"), "cpu"),
        ("elsewhere", "elsewhere"),
    ],
)
def test_a_device_has_one_name_however_a_hook_was_told_of_it(device, name, monkeypatch):
    monkeypatch.setattr(placement, "detect", lambda: SimpleNamespace(type="cuda"))
    model = nn.Linear(4, 4)
    model._hf_hook = CpuOffload(device)
    place = _only(model)
    assert place.runs_on == (name,)
    model._hf_hook = AlignDevicesHook(device)
    assert _only(model).runs_on == (name,)


def test_an_index_without_accelerator_is_no_reason_to_fail(monkeypatch):
    monkeypatch.setattr(placement, "detect", lambda: SimpleNamespace(type="cpu"))
    model = nn.Linear(4, 4)
    model._hf_hook = AlignDevicesHook(0)
    assert _only(model).runs_on == ("0",)


def test_of_a_sharded_tensor_the_part_that_is_here_counts():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        model = nn.Linear(4, 8, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (4,)), [Shard(0)]))
        assert _only(model).parameters == 8 * 4 * 4 // 4
    finally:
        dist.destroy_process_group()


def test_hooks_beside_others_and_weights_in_a_plain_dict():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = {name: value.clone() for name, value in model[0].state_dict().items()}
    add_hook_to_module(model[0], ModelHook())
    add_hook_to_module(model[0], AlignDevicesHook("cpu", offload=True, weights_map=weights), append=True)
    kept, there = device_map_report(model).places
    assert (kept.kept, kept.parameters, there.kept, there.parameters) == ("host memory", 80, "there", 80)


def test_a_tied_weight_counts_once_wherever_it_is(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    assert (_only(model).parameters, _only(model).modules) == (64, 2)
    save_file({"0.weight": model[0].weight.detach().clone()}, tmp_path / "x.safetensors")
    index = {
        "0.weight": {
            "safetensors_file": str(tmp_path / "x.safetensors"),
            "weight_name": "0.weight",
            "dtype": "float32",
        }
    }
    dispatch_model(model, {"": "disk"}, offload_index=index, force_hooks=True)
    assert (_only(model).kept, _only(model).parameters, _only(model).modules) == ("safetensors", 64, 2)
    shared = nn.Linear(4, 4)
    assert (_only(nn.Sequential(shared, shared)).parameters, _only(nn.Sequential(shared, shared)).modules) == (80, 1)


def test_tensors_without_data_are_named():
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    report = device_map_report(model)
    assert report == DeviceMapReport((), ("0.bias", "0.weight", "1.weight"))
    assert str(report).endswith("Without data (on meta, and no hook has them): 0.bias, 0.weight, 1.weight")
    # A hook that does not have the weight does not help; one that does, does.
    add_hook_to_module(model[1], AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(4, 4)}))
    model[0]._hf_hook = AlignDevicesHook("cpu", offload=True, weights_map={"bias": torch.ones(4)})
    assert device_map_report(model).without_data == ("0.weight",)
