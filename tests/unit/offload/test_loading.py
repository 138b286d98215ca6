"""Checkpoints into models."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.offload.loading import (
    load_checkpoint_in_model,
    load_offloaded_weights,
    load_state_dict,
)
from accelerate.offload.store import OffloadWriter, offload_weight


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


@pytest.fixture
def source():
    return {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in _Net().state_dict().items()}


def _empty():
    with init_empty_weights():
        return _Net()


def _save_sharded(folder, state, safe):
    folder.mkdir()
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[:4], names[4:])):
        file = f"part{number}.{'safetensors' if safe else 'bin'}"
        tensors = {name: state[name] for name in part}
        if safe:
            save_file(tensors, folder / file)
        else:
            torch.save(tensors, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _equal(model, state):
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.fixture(params=["bin", "safetensors", "sharded bin", "sharded safetensors", "folder"])
def checkpoint(request, source, tmp_path):
    kind = request.param
    if kind.startswith("sharded"):
        _save_sharded(tmp_path / "checkpoint", source, safe="safe" in kind)
        return tmp_path / "checkpoint"
    if kind == "bin":
        torch.save(source, tmp_path / "m.bin")
        return tmp_path / "m.bin"
    save_file(source, tmp_path / "model.safetensors")
    return tmp_path if kind == "folder" else tmp_path / "model.safetensors"


def test_every_kind_of_checkpoint_loads_with_and_without_a_map(checkpoint, source):
    filled = _Net()
    weight = filled.linear1.weight
    load_checkpoint_in_model(filled, checkpoint)
    assert _equal(filled, source) and filled.linear1.weight is weight
    for options in ({}, {"device_map": {"": "cpu"}}, {"device_map": {"": "cpu"}, "offload_state_dict": True}):
        model = _empty()
        load_checkpoint_in_model(model, checkpoint, **options)
        assert _equal(model, source)


def test_disk_weights_are_written_and_stay_on_meta(checkpoint, source, tmp_path):
    model = _empty()
    device_map = {"linear1": "cpu", "norm": "disk", "linear2": "disk"}
    load_checkpoint_in_model(model, checkpoint, device_map=device_map, offload_folder=tmp_path / "o")
    assert model.linear2.weight.device.type == "meta" and torch.equal(model.linear1.weight, source["linear1.weight"])
    assert torch.equal(model.norm.running_mean, source["norm.running_mean"])  # buffers stay, unless asked for
    index = json.loads((tmp_path / "o" / "index.json").read_text())
    assert set(index) == {"norm.weight", "norm.bias", "linear2.weight", "linear2.bias"}
    load_offloaded_weights(model, index, tmp_path / "o")
    assert _equal(model, source)


def test_offloaded_buffers(checkpoint, tmp_path):
    model = _empty()
    load_checkpoint_in_model(
        model, checkpoint, device_map={"": "disk"}, offload_folder=tmp_path / "o", offload_buffers=True
    )
    assert model.norm.running_mean.device.type == "meta"
    entry = json.loads((tmp_path / "o" / "index.json").read_text())["norm.running_mean"]
    assert ("safetensors_file" in entry) != (tmp_path / "o" / "norm.running_mean.dat").is_file()


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"linear1": "cpu", "norm": "cpu", "linear2": "disk"}])
def test_dtype_applies_everywhere_but_to_what_is_kept(device_map, checkpoint, tmp_path):
    model = _empty()
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=tmp_path / "o",
        dtype="bfloat16",
        keep_in_fp32_modules=["norm"],
    )
    assert model.linear1.weight.dtype is model.linear2.weight.dtype is torch.bfloat16
    assert model.norm.weight.dtype is torch.float32
    assert model.norm.num_batches_tracked.dtype is torch.int64
    if device_map and "disk" in device_map.values():
        assert json.loads((tmp_path / "o" / "index.json").read_text())["linear2.weight"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("empty", [("linear1",), ("linear1", "norm", "linear2"), ()])
def test_a_partly_empty_model_takes_the_dtype_of_the_file(empty, source, tmp_path):
    save_file(
        {name: t.half() if t.is_floating_point() else t for name, t in source.items()}, tmp_path / "model.safetensors"
    )
    model = _Net()
    for name in empty:
        for key, parameter in list(getattr(model, name).named_parameters()):
            setattr(getattr(model, name), key, nn.Parameter(parameter.to("meta")))
    weight = model.linear2.weight
    load_checkpoint_and_dispatch(model.eval(), tmp_path / "model.safetensors")
    wanted = torch.half if empty else torch.float
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {wanted}
    assert (model.linear2.weight is weight) == ("linear2" not in empty)
    assert model.linear2(model.norm(model.linear1(torch.ones(2, 3, dtype=wanted)))).dtype is wanted


def test_names_that_differ_warn_or_raise(source, tmp_path, caplog):
    state = {**source, "extra": torch.ones(1)}
    del state["linear2.bias"]
    torch.save(state, tmp_path / "m.bin")
    for device_map in (None, {"": "cpu"}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_checkpoint_in_model(_Net(), tmp_path / "m.bin", device_map=device_map)
        assert "extra" in caplog.text
        with pytest.raises(RuntimeError, match=r"extra.*linear2\.bias"):
            load_checkpoint_in_model(_Net(), tmp_path / "m.bin", device_map=device_map, strict=True)


def test_tied_weights_load_from_one_name_and_stay_tied(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "m.bin")
    for device_map in (None, {"": "cpu"}):
        load_checkpoint_in_model(model, tmp_path / "m.bin", device_map=device_map, strict=True)
        assert model["a"].weight is model["b"].weight and (model["b"].weight == 1).all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"device_map": {"": "disk"}}, "offload_folder"),
        ({"device_map": {"linear1": "cpu"}}, "no device for"),
        ({"dtype": "bf16"}, "bf16"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments, text, source, tmp_path):
    torch.save(source, tmp_path / "m.bin")
    with pytest.raises(ValueError, match=text):
        load_checkpoint_in_model(_empty(), tmp_path / "m.bin", **arguments)


def test_state_dict_files_run_no_code_and_must_be_for_torch(tmp_path):
    torch.save({"w": object}, tmp_path / "bad.bin")
    with pytest.raises(Exception, match="[Ww]eights"):
        load_state_dict(tmp_path / "bad.bin")
    save_file({"w": torch.ones(1)}, tmp_path / "tf.safetensors", metadata={"format": "tf"})
    with pytest.raises(ValueError, match="'tf'"):
        load_state_dict(tmp_path / "tf.safetensors")
    save_file({"w": torch.ones(1)}, tmp_path / "odd.safetensors", metadata={"format": "odd"})
    with pytest.raises(OSError, match="'odd'"):
        load_state_dict(tmp_path / "odd.safetensors")


def test_a_map_places_tensors_of_safetensors_while_reading(tmp_path):
    save_file({"a.w": torch.ones(1), "b.w": torch.ones(1), "c": torch.ones(1)}, tmp_path / "m.safetensors")
    loaded = load_state_dict(tmp_path / "m.safetensors", device_map={"a": "meta", "b": "disk"})
    assert {name: tensor.device.type for name, tensor in loaded.items()} == {"a.w": "meta", "b.w": "cpu", "c": "cpu"}


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"broadcast_from_rank0": True}, {"strict": True}])
def test_sharded_models_load_whole_tensors(options, mesh, source, tmp_path):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.save(source, tmp_path / "m.bin")
    model = _Net()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    load_checkpoint_in_model(model, tmp_path / "m.bin", **options)
    assert isinstance(model.linear1.weight, DTensor)
    assert all(torch.equal(parameter.full_tensor(), source[name]) for name, parameter in model.named_parameters())
    with pytest.raises(ValueError, match="dtype="):
        load_checkpoint_in_model(model, tmp_path / "m.bin", dtype="float16")
    with pytest.raises(ValueError, match="full_state_dict"):
        load_checkpoint_in_model(model, tmp_path / "m.bin", broadcast_from_rank0=True, full_state_dict=False)


class _Scaled(nn.Linear):
    """A layer with extra state, and a buffer that is in no checkpoint."""

    def __init__(self, extra=None):
        super().__init__(2, 2)
        self.extra = extra
        self.register_buffer("mask", torch.zeros(3), persistent=False)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": 2}, torch.ones(3)], ids=["dict", "tensor"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_extra_state_goes_to_its_module(extra, device_map, strict, tmp_path, caplog):
    torch.save(nn.Sequential(_Scaled(extra)).state_dict(), tmp_path / "m.bin")
    model = nn.Sequential(_Scaled())
    with caplog.at_level(logging.WARNING):
        load_checkpoint_and_dispatch(
            model, tmp_path / "m.bin", device_map, offload_folder=tmp_path / "o", strict=strict
        )
    assert str(model[0].extra) == str(extra) and caplog.text == ""
    model(torch.ones(1, 2))


def test_models_with_extra_state_are_offloaded(tmp_path):
    for offload in (lambda model: cpu_offload(model, "cpu"), lambda model: disk_offload(model, tmp_path)):
        model = nn.Sequential(_Scaled({"scale": 2}))
        plain = model(torch.ones(1, 2))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        offload(model)
        assert model[0].weight.is_meta and (torch.equal(model(torch.ones(1, 2)), plain))


@pytest.mark.parametrize("size", [3, 5])
def test_buffers_of_no_checkpoint_are_not_read_from_old_ones(size, tmp_path, caplog):
    state = {**_Scaled().state_dict(), "mask": torch.ones(size)}
    del state["_extra_state"]
    save_file(state, tmp_path / "m.safetensors")
    for device_map in (None, {"": "cpu"}, {"": "disk"}):
        model = _Scaled()
        caplog.clear()
        load_checkpoint_and_dispatch(model, tmp_path / "m.safetensors", device_map)
        assert not model.mask.any() and "mask" in caplog.text


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"one": "cpu", "two": "disk"}], ids=str)
def test_one_name_of_a_shared_module_is_enough(device_map, tmp_path):
    def shared():
        model = nn.ModuleDict({"one": nn.BatchNorm1d(2)})
        model["two"] = model["one"]
        return model

    state = {name: tensor.clone() for name, tensor in shared().state_dict().items() if name.startswith("one")}
    state["one.weight"].fill_(3)
    save_file(state, tmp_path / "m.safetensors")
    model = shared()
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", device_map, tmp_path / "o", strict=True)
    if device_map != {"one": "cpu", "two": "disk"}:
        assert (model["two"].weight == 3).all()


@pytest.mark.parametrize("there", [False, True])
def test_eight_bit_weights_that_were_written_before_an_error_are_removed(there, source, tmp_path, monkeypatch):
    real, written = OffloadWriter.add, []

    def add(self, name, weight):
        if len(written) == 2:
            raise RuntimeError("no more")
        written.append(real(self, name, weight))

    torch.save(source, tmp_path / "m.bin")
    if there:
        offload_weight(torch.ones(1), "other", tmp_path / "o")
    monkeypatch.setattr(OffloadWriter, "add", add)
    model = _empty()
    with pytest.raises(RuntimeError, match="no more"):
        load_checkpoint_in_model(model, tmp_path / "m.bin", {"": "disk"}, tmp_path / "o", offload_8bit_bnb=True)
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["other.dat"] * there
