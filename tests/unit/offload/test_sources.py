"""Checkpoints that are broken in one way or another: a clear error, and nothing changed."""

import errno
import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.offload.files import open_checkpoint
from accelerate.offload.loading import load_checkpoint_in_model


class _Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("flags", torch.zeros(width, dtype=torch.uint8))

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture(params=["safetensors", "bin"])
def kind(request):
    return request.param


def _save(folder, state, kind):
    parts = {
        f"part1.{kind}": ["first.weight", "first.bias"],
        f"part2.{kind}": ["second.weight", "second.bias", "flags"],
    }
    for file, names in parts.items():
        tensors = {name: state[name] for name in names if name in state}
        save_file(tensors, folder / file) if kind == "safetensors" else torch.save(tensors, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def checkpoint(kind, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    _save(folder, _Net().state_dict(), kind)
    return folder


def _lose(folder, kind):
    (folder / f"part2.{kind}").unlink()


def _truncate(folder, kind):
    data = (folder / f"part2.{kind}").read_bytes()
    (folder / f"part2.{kind}").write_bytes(data[:-20])


def _mix_up(folder, kind):
    shutil.copy(folder / f"part1.{kind}", folder / f"part2.{kind}")


def _change(name, value):
    def change(folder, kind):
        _save(folder, {**_Net().state_dict(), name: value}, kind)

    return change


def _lack(folder, kind):
    state = _Net().state_dict()
    del state["second.bias"]
    _save(folder, state, kind)
    index = json.loads((folder / "model.index.json").read_text())
    del index["weight_map"]["second.bias"]
    (folder / "model.index.json").write_text(json.dumps(index))


def _break_index(folder, kind):
    (folder / "model.index.json").write_text('{"weight_map": ["first.weight"]}')


FAULTS = {
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
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor, tensor.device, tensor.data_ptr()) for name, tensor in tensors}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "device_map", [None, {"": "cpu"}, {"first": "disk", "second": "cpu", "flags": "cpu"}, {"": "disk"}], ids=str
)
def test_a_broken_checkpoint_changes_nothing(fault, device_map, kind, checkpoint, tmp_path):
    damage, error, message = FAULTS[fault]
    damage(checkpoint, kind)
    for empty in (True, False):
        with init_empty_weights() if empty else torch.no_grad():
            model = _Net()
        before = _snapshot(model)
        with pytest.raises(error, match=message):
            load_checkpoint_and_dispatch(model, checkpoint, device_map, offload_folder=tmp_path / "offload")
        assert {
            name: now[0] is before[name][0] and now == before[name] for name, now in _snapshot(model).items()
        } == dict.fromkeys(before, True)
        assert not any("_hf_hook" in module.__dict__ for module in model.modules())
        assert not hasattr(model, "hf_device_map") and sorted(os.listdir(tmp_path)) == ["checkpoint"]


def test_safetensors_on_disk_need_no_folder_and_other_formats_do(kind, checkpoint, tmp_path):
    with init_empty_weights():
        model = _Net()
    if kind == "safetensors":
        load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"})
        assert model(torch.ones(1, 4)).shape == (1, 4)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint"] and len(os.listdir(checkpoint)) == 3
    else:
        with pytest.raises(
            ValueError,
            match=r"sends first\.weight, first\.bias, second\.weight and 1 more to the disk.*`offload_folder`",
        ):
            load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"})
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_the_index_in_the_folder_dispatches_later(kind, checkpoint, tmp_path):
    with init_empty_weights():
        model = _Net()
    load_checkpoint_in_model(model, checkpoint, {"": "disk"}, offload_folder=tmp_path / "o")
    written = {name for name in os.listdir(tmp_path / "o") if name.endswith(".dat")}
    assert len(written) == (0 if kind == "safetensors" else 4)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "o")
    plain = _Net()
    load_checkpoint_in_model(plain, checkpoint)
    assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))


def test_a_full_disk_while_loading_leaves_nothing_behind(tmp_path, monkeypatch):
    _save(tmp_path, _Net().state_dict(), "bin")
    real, calls = Path.write_bytes, []

    def full(path, data):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with init_empty_weights():
        model = _Net()
    with pytest.raises(OSError, match=r"Offloading second\.weight.* failed: No space left") as caught:
        load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, offload_folder=tmp_path / "o")
    assert caught.value.errno == errno.ENOSPC and not os.listdir(tmp_path / "o")
    assert not any("_hf_hook" in module.__dict__ for module in model.modules())


def test_a_load_shows_one_bar_and_says_nothing(kind, checkpoint, tmp_path, monkeypatch, caplog, capfd):
    import tqdm.auto

    bars = []

    class Bar(tqdm.auto.tqdm):
        def __init__(self, *arguments, **options):
            bars.append(options)
            super().__init__(*arguments, **{**options, "disable": True})

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    with init_empty_weights():
        model = _Net()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint_and_dispatch(
            model, checkpoint, {"first": "disk", "second": "cpu", "flags": "cpu"}, offload_folder=tmp_path / "o"
        )
        model(torch.ones(1, 4))
    assert [bar["total"] for bar in bars] == [164] and bars[0]["delay"] > 0 and bars[0]["disable"] is None
    assert caplog.text == "" and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ({"safetensors_file": "absent.safetensors"}, FileNotFoundError, r"absent\.safetensors does not exist"),
        ({"safetensors_file": "part1.safetensors", "weight_name": "x"}, KeyError, r"no tensor 'x'"),
        (
            {"safetensors_file": "part1.safetensors", "weight_name": "first.bias"},
            ValueError,
            r"first\.weight has shape \(4,\)",
        ),
        ({"dtype": "float32", "shape": [4, 4]}, ValueError, r"no `save_folder`"),
    ],
)
def test_an_offload_index_is_checked_before_dispatch(entry, error, message, tmp_path):
    _save(tmp_path, _Net().state_dict(), "safetensors")
    model = _Net()
    index = {
        name: {"safetensors_file": str(tmp_path / f"part{1 + (not name.startswith('first'))}.safetensors")}
        for name in model.state_dict()
    }
    if "safetensors_file" in entry:
        entry = {**entry, "safetensors_file": str(tmp_path / entry["safetensors_file"])}
    index["first.weight"] = entry
    weight = model.first.weight
    with pytest.raises(error, match=message):
        dispatch_model(model, {"": "disk"}, offload_index=index)
    assert model.first.weight is weight and not any("_hf_hook" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"first": "cpu", "second": "disk", "flags": "cpu"}], ids=str)
def test_a_checkpoint_without_a_weight_that_the_model_lacks_changes_nothing(device_map, kind, checkpoint, tmp_path):
    _lack(checkpoint, kind)
    with init_empty_weights():
        model = _Net()
    before = _snapshot(model)
    with pytest.raises(ValueError, match=r"nobody has their data: second\.bias \(for"):
        load_checkpoint_and_dispatch(model, checkpoint, device_map, offload_folder=tmp_path / "offload")
    assert {name: now[0] is before[name][0] for name, now in _snapshot(model).items()} == dict.fromkeys(before, True)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint"] and not hasattr(model, "hf_device_map")
    with pytest.raises(ValueError, match=r"nobody has their data: first\.bias"):
        dispatch_model(model, {"": "cpu"})
    load_checkpoint_in_model(model, checkpoint, {"": "cpu"})  # the rest may come from elsewhere
    assert model.second.bias.is_meta and not model.second.weight.is_meta


def test_devices_that_are_not_there_are_named(checkpoint):
    with init_empty_weights():
        model = _Net()
    for call in (
        lambda: load_checkpoint_and_dispatch(model, checkpoint, {"first": 7, "second": "cpu", "flags": "cpu"}),
        lambda: dispatch_model(_Net(), {"first": "cuda:7", "second": "cpu", "flags": "cpu"}),
        lambda: dispatch_model(_Net(), {"": "dsk"}),
    ):
        with pytest.raises(ValueError, match=r"7|cuda|dsk"):
            call()
    assert model.first.weight.device.type == "meta"


def test_an_index_may_have_any_name(checkpoint):
    model, index = _Net(), checkpoint / "model.index.json"
    load_checkpoint_in_model(model, index.rename(checkpoint / "weights.json"))
    assert model.state_dict().keys() == open_checkpoint(checkpoint / "weights.json").keys()
    for folder, text in (
        (checkpoint, "exactly one `.index.json`.*found: none"),
        (checkpoint / "no", "does not exist"),
    ):
        with pytest.raises(ValueError, match=text):
            load_checkpoint_in_model(model, folder)
    (checkpoint / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="config.json is no index"):
        load_checkpoint_in_model(model, checkpoint / "config.json")
