"""Checkpoints into models; broken in one way or another they give a clear error, and change nothing."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.extensions.big_models.loading import load_checkpoint_in_model, load_state_dict, open_checkpoint
from accelerate.extensions.big_models.store import OffloadWriter, offload_weight
from cases import cases
from offload_models import Net


@pytest.fixture
def source():
    return {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in Net().state_dict().items()}


def _empty(kind=Net):
    with init_empty_weights():
        return kind()


def _save_parts(folder, state, kind, first="first"):
    """Write what begins like that to one file, the rest to another, and an index."""
    folder.mkdir(exist_ok=True)
    weight_map = {name: f"part{1 if name.startswith(first) else 2}.{kind}" for name in state}
    for file in dict.fromkeys(weight_map.values()):
        tensors = {name: state[name] for name in state if weight_map[name] == file}
        save_file(tensors, folder / file) if kind == "safetensors" else torch.save(tensors, folder / file)
    (folder / "model.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(params=["bin", "safetensors", "sharded bin", "sharded safetensors", "folder"])
def checkpoint(request, source, tmp_path):
    kind = request.param
    if kind.startswith("sharded"):
        _save_parts(tmp_path / "checkpoint", source, kind.removeprefix("sharded "), first="linear1")
        return tmp_path / "checkpoint"
    if kind == "bin":
        torch.save(source, tmp_path / "m.bin")
        return tmp_path / "m.bin"
    save_file(source, tmp_path / "model.safetensors")
    return tmp_path if kind == "folder" else tmp_path / "model.safetensors"


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"linear1": "cpu", "norm": "cpu", "linear2": "disk"}])
def test_dtype_applies_everywhere_but_to_what_is_kept(device_map, checkpoint, tmp_path):
    model = _empty()
    options = {"dtype": "bfloat16", "keep_in_fp32_modules": ["norm"]}
    load_checkpoint_in_model(model, checkpoint, device_map=device_map, offload_folder=tmp_path / "o", **options)
    assert model.linear1.weight.dtype is model.linear2.weight.dtype is torch.bfloat16
    assert model.norm.weight.dtype is torch.float32
    assert model.norm.num_batches_tracked.dtype is torch.int64
    if device_map and "disk" in device_map.values():
        assert json.loads((tmp_path / "o" / "index.json").read_text())["linear2.weight"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("empty", [("linear1",), ("linear1", "norm", "linear2"), ()])
def test_a_partly_empty_model_takes_the_dtype_of_the_file(empty, source, tmp_path):
    halved = {name: t.half() if t.is_floating_point() else t for name, t in source.items()}
    save_file(halved, tmp_path / "model.safetensors")
    model = Net()
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
            load_checkpoint_in_model(Net(), tmp_path / "m.bin", device_map=device_map)
        assert "extra" in caplog.text
        with pytest.raises(RuntimeError, match=r"extra.*linear2\.bias"):
            load_checkpoint_in_model(Net(), tmp_path / "m.bin", device_map=device_map, strict=True)


def test_tied_weights_load_from_one_name_and_stay_tied(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "m.bin")
    for device_map in (None, {"": "cpu"}):
        load_checkpoint_in_model(model, tmp_path / "m.bin", device_map=device_map, strict=True)
        assert model["a"].weight is model["b"].weight and (model["b"].weight == 1).all()


@cases("arguments, text", ({"device_map": {"linear1": "cpu"}}, "no device for"), ({"dtype": "bf16"}, "bf16"))
def test_arguments_that_cannot_work_are_named(arguments, text, source, tmp_path):
    torch.save(source, tmp_path / "m.bin")
    with pytest.raises(ValueError, match=text):
        load_checkpoint_in_model(_empty(), tmp_path / "m.bin", **arguments)


def test_state_dict_files_run_no_code_must_be_for_torch_and_go_where_a_map_says(tmp_path):
    torch.save({"w": object}, tmp_path / "bad.bin")
    with pytest.raises(Exception, match="[Ww]eights"):
        load_state_dict(tmp_path / "bad.bin")
    for written_for, error in (("tf", ValueError), ("odd", OSError)):
        save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors", metadata={"format": written_for})
        with pytest.raises(error, match=repr(written_for)):
            load_state_dict(tmp_path / "m.safetensors")
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
    model = Net()
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


def test_eight_bit_weights_that_were_written_before_an_error_are_removed(source, tmp_path, monkeypatch):
    real, written = OffloadWriter.add, []

    def add(self, name, weight):
        if len(written) == 2:
            raise RuntimeError("no more")
        written.append(real(self, name, weight))

    torch.save(source, tmp_path / "m.bin")
    offload_weight(torch.ones(1), "other", tmp_path / "o")
    monkeypatch.setattr(OffloadWriter, "add", add)
    with pytest.raises(RuntimeError, match="no more"):
        load_checkpoint_in_model(_empty(), tmp_path / "m.bin", {"": "disk"}, tmp_path / "o", offload_8bit_bnb=True)
    assert os.listdir(tmp_path / "o") == ["other.dat"]


# --- broken checkpoints ---


class _Pair(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("flags", torch.zeros(width, dtype=torch.uint8))

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture(params=["safetensors", "bin"])
def kind(request):
    return request.param


@pytest.fixture
def parts(kind, tmp_path):
    """The folder of a checkpoint in two files and an index."""
    _save_parts(tmp_path / "checkpoint", _Pair().state_dict(), kind)
    return tmp_path / "checkpoint"


def _lose(folder, kind):
    (folder / f"part2.{kind}").unlink()


def _truncate(folder, kind):
    data = (folder / f"part2.{kind}").read_bytes()
    (folder / f"part2.{kind}").write_bytes(data[:-20])


def _mix_up(folder, kind):
    shutil.copy(folder / f"part1.{kind}", folder / f"part2.{kind}")


def _change(name, value):
    def change(folder, kind):
        _save_parts(folder, {**_Pair().state_dict(), name: value}, kind)

    return change


def _break_index(folder, kind):
    (folder / "model.index.json").write_text('{"weight_map": ["first.weight"]}')


def _lead_out(way):
    """Let the index name a file that is there by a path that leaves the folder."""

    def change(folder, kind):
        text = (folder / "model.index.json").read_text()
        (folder / "model.index.json").write_text(text.replace("part2", way.format(folder.parent)))

    return change


FAULTS = {
    "relative path": (_lead_out("../checkpoint/part2"), ValueError, r"names '\.\./check.*leads out of .*checkpoint"),
    "absolute path": (_lead_out("{}/checkpoint/part2"), ValueError, r"names '/.*, which leads out of"),
    "lost": (_lose, FileNotFoundError, r"names 2 files, of which 1 are not in .*part2"),
    "truncated": (_truncate, ValueError, r"part2.* is truncated or no"),
    "other names": (_mix_up, ValueError, r"lacks weights .*index says.*second\.weight"),
    "other shape": (
        _change("second.weight", torch.ones(3, 4)),
        ValueError,
        r"does not belong to this model.*second\.weight has shape \(3, 4\), the model \(4, 4\)",
    ),
    "other kind": (
        _change("second.weight", torch.ones(4, 4, dtype=torch.int8)),
        ValueError,
        r"second\.weight is torch\.int8, the model's parameter torch\.float32",
    ),
    "index": (_break_index, ValueError, r"is no index of a sharded checkpoint"),
}


def _snapshot(model):
    """What a load may not change: which tensors there are, where, with which memory, and whether the model has hooks."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    hooked = any("_hf_hook" in module.__dict__ for module in model.modules())
    return [(name, id(t), t.device, t.data_ptr()) for name, t in tensors], hooked, hasattr(model, "hf_device_map")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "device_map", [None, {"": "cpu"}, {"first": "disk", "second": "cpu", "flags": "cpu"}, {"": "disk"}], ids=str
)
def test_a_broken_checkpoint_changes_nothing(fault, device_map, kind, parts, tmp_path):
    damage, error, message = FAULTS[fault]
    damage(parts, kind)
    for empty in (True, False):
        model = _empty(_Pair) if empty else _Pair()
        before = _snapshot(model)
        with pytest.raises(error, match=message):
            load_checkpoint_and_dispatch(model, parts, device_map, offload_folder=tmp_path / "offload")
        assert _snapshot(model) == before and os.listdir(tmp_path) == ["checkpoint"]


def test_safetensors_on_disk_need_no_folder_and_other_formats_do(kind, parts, tmp_path):
    model = _empty(_Pair)
    if kind == "safetensors":
        load_checkpoint_and_dispatch(model, parts, {"": "disk"})
        assert model(torch.ones(1, 4)).shape == (1, 4)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint"] and len(os.listdir(parts)) == 3
    else:
        with pytest.raises(
            ValueError,
            match=r"sends first\.weight, first\.bias, second\.weight and 1 more to the disk.*`offload_folder`",
        ):
            load_checkpoint_and_dispatch(model, parts, {"": "disk"})
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_full_disk_while_loading_leaves_nothing_behind(tmp_path, monkeypatch):
    state = _Pair().state_dict()
    state["flags"] = state.pop("flags")  # last, since buffers are placed on the CPU
    _save_parts(tmp_path, state, "bin")
    real, calls = Path.write_bytes, []

    def full(path, data):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    model = _empty(_Pair)
    before = _snapshot(model)
    with pytest.raises(OSError, match=r"Offloading second\.weight.* failed: No space left") as caught:
        load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, offload_folder=tmp_path / "o")
    assert caught.value.errno == errno.ENOSPC and not os.listdir(tmp_path / "o")
    assert _snapshot(model) == before


@cases(
    "entry, error, message",
    ({"safetensors_file": "absent.safetensors"}, FileNotFoundError, r"absent\.safetensors does not exist"),
    ({"safetensors_file": "part1.safetensors", "weight_name": "x"}, KeyError, r"no tensor 'x'"),
    ({"safetensors_file": "part1.safetensors", "weight_name": "first.bias"}, ValueError, r"weight has shape \(4,\)"),
    ({"dtype": "float32", "shape": [4, 4]}, ValueError, r"no `save_folder`"),
)
def test_an_offload_index_is_checked_before_dispatch(entry, error, message, tmp_path):
    _save_parts(tmp_path, _Pair().state_dict(), "safetensors")
    model = _Pair()
    index = {
        name: {"safetensors_file": str(tmp_path / f"part{1 + (not name.startswith('first'))}.safetensors")}
        for name in model.state_dict()
    }
    if "safetensors_file" in entry:
        entry = {**entry, "safetensors_file": str(tmp_path / entry["safetensors_file"])}
    index["first.weight"] = entry
    before = _snapshot(model)
    with pytest.raises(error, match=message):
        dispatch_model(model, {"": "disk"}, offload_index=index)
    assert _snapshot(model) == before


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"first": "cpu", "second": "disk", "flags": "cpu"}], ids=str)
def test_a_checkpoint_without_a_weight_that_the_model_lacks_changes_nothing(device_map, kind, parts, tmp_path):
    _save_parts(parts, {name: t for name, t in _Pair().state_dict().items() if name != "second.bias"}, kind)
    model = _empty(_Pair)
    before = _snapshot(model)
    with pytest.raises(ValueError, match=r"their data is missing: second\.bias \(for"):
        load_checkpoint_and_dispatch(model, parts, device_map, offload_folder=tmp_path / "offload")
    assert _snapshot(model) == before and os.listdir(tmp_path) == ["checkpoint"]
    with pytest.raises(ValueError, match=r"their data is missing: first\.bias"):
        dispatch_model(model, {"": "cpu"})
    load_checkpoint_in_model(model, parts, {"": "cpu"})  # the rest may come from elsewhere
    assert model.second.bias.is_meta and not model.second.weight.is_meta


def test_devices_that_are_not_there_are_named(parts):
    model = _empty(_Pair)
    for call in (
        lambda: load_checkpoint_and_dispatch(model, parts, {"first": 7, "second": "cpu", "flags": "cpu"}),
        lambda: dispatch_model(_Pair(), {"first": "cuda:7", "second": "cpu", "flags": "cpu"}),
        lambda: dispatch_model(_Pair(), {"": "dsk"}),
    ):
        with pytest.raises(ValueError, match=r"7|cuda|dsk"):
            call()
    assert model.first.weight.device.type == "meta"


def test_an_index_may_have_any_name(parts):
    model, index = _Pair(), parts / "model.index.json"
    load_checkpoint_in_model(model, index.rename(parts / "weights.json"))
    assert model.state_dict().keys() == open_checkpoint(parts / "weights.json").keys()
    for folder, text in ((parts, "exactly one `.index.json`.*found: none"), (parts / "no", "does not exist")):
        with pytest.raises(ValueError, match=text):
            load_checkpoint_in_model(model, folder)
    (parts / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="config.json is no index"):
        load_checkpoint_in_model(model, parts / "config.json")
