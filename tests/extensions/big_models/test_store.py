"""Weights that are kept elsewhere: in files that are read where they are, and in folders that are filled in one step."""

import errno
import json
import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import disk_offload, dispatch_model, init_empty_weights
from accelerate.extensions.big_models import store
from accelerate.extensions.big_models.loading import load_offloaded_weights, quantize_and_offload_8bit
from accelerate.extensions.big_models.weights import get_state_dict_offloaded_model, write_missing
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

TENSORS = {
    "float": torch.randn(2, 3),
    "bfloat16": torch.randn(3).bfloat16(),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.0),
    "bool": torch.tensor([True, False]),
    "long": torch.arange(3),
    "complex": torch.ones(2, dtype=torch.complex64),
    "empty": torch.zeros(0, 3),
    "strided": torch.arange(6.0).reshape(2, 3).t(),
}


def _listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- one weight in a file ---


def test_every_dtype_and_shape_comes_back(tmp_path):
    for name, tensor in TENSORS.items():
        index = store.offload_weight(tensor, name, tmp_path, index={})
        loaded = store.load_offloaded_weight(tmp_path / f"{name}.dat", index[name])
        assert loaded.dtype is tensor.dtype and loaded.shape == tensor.shape, name
        assert torch.equal(*(one.float() if name == "float8" else one for one in (loaded, tensor))), name
    assert (tmp_path / "bfloat16.dat").read_bytes() == TENSORS["bfloat16"].view(torch.int16).numpy().tobytes()


def test_rewriting_a_weight_does_not_change_a_loaded_one(tmp_path):
    index = store.offload_weight(torch.zeros(1000), "w", tmp_path, index={})
    loaded = store.load_offloaded_weight(tmp_path / "w.dat", index["w"])
    store.offload_weight(torch.ones(10), "w", tmp_path, index=index)
    assert (loaded == 0).all()
    loaded.add_(1)
    assert (store.load_offloaded_weight(tmp_path / "w.dat", index["w"]) == 1).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.dat"]


def test_files_and_indices_that_are_damaged_or_missing_are_named(tmp_path):
    index = store.offload_weight(torch.arange(4.0), "w", tmp_path, index={})
    (tmp_path / "w.dat").write_bytes(bytes(15))
    with pytest.raises(ValueError, match="has 15 bytes"):
        store.load_offloaded_weight(tmp_path / "w.dat", index["w"])
    with pytest.raises(FileNotFoundError, match=r"v\.dat"):
        store.load_offloaded_weight(tmp_path / "v.dat", index["w"])
    for text in ("{", '{"a": 1}'):
        (tmp_path / "index.json").write_text(text)
        for call in (lambda: store.read_index(tmp_path), lambda: store.save_offload_index({"a": {}}, tmp_path)):
            with pytest.raises(ValueError, match=r"index\.json is no index"):
                call()
        assert (tmp_path / "index.json").read_text() == text


@pytest.mark.parametrize("name", ["../w", "a/b", "/w", "w\0"])
def test_no_name_leads_out_of_the_folder(name, tmp_path):
    folder = tmp_path / "o"
    index = {name: {"dtype": "float32", "shape": [1]}}
    (tmp_path / "w.dat").write_bytes(bytes(4))
    for call in (
        lambda: store.offload_state_dict(folder, {"a": torch.ones(1), name: torch.ones(1)}),
        lambda: store.offload_weight(torch.ones(1), name, folder),
        lambda: store.OffloadedWeightsLoader(save_folder=folder, index=index)[name],
    ):
        with pytest.raises(ValueError, match="cannot be a file in"):
            call()
    assert list(_listing(tmp_path)) == ["w.dat"]


# --- folders ---


@pytest.fixture
def full_disk(monkeypatch):
    """Have the disk be full after so many bytes."""
    real = Path.write_bytes

    def fill(after):
        left = [after]

        def write_bytes(path, data):
            fits, left[0] = min(left[0], len(data)), max(0, left[0] - len(data))
            real(path, data[:fits])
            if fits < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_bytes", write_bytes)

    return fill


@pytest.mark.parametrize("after", [0, 400, 420])
def test_a_full_disk_leaves_the_files_as_they_were(after, full_disk, tmp_path):
    folder = tmp_path / "deep" / "offload"
    store.offload_state_dict(folder, {"a": torch.zeros(3), "kept": torch.ones(1)})
    before = _listing(tmp_path)
    full_disk(after)
    with pytest.raises(OSError, match=r"Offloading .* to .*offload failed: No space left.*Nothing of it") as caught:
        store.offload_state_dict(folder, {"a": torch.ones(100), "b": torch.ones(5)})
    assert caught.value.errno == errno.ENOSPC and _listing(tmp_path) == before


@pytest.mark.parametrize("fails_at", ["new.dat", "old.dat", "index.json"])
def test_a_rename_that_fails_leaves_the_index_as_it_was(fails_at, monkeypatch, tmp_path):
    store.offload_state_dict(tmp_path, {"kept": torch.ones(1), "old": torch.zeros(3)})
    before, real = _listing(tmp_path), os.replace

    def replace(source, target):
        if Path(target).name == fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="Input/output error"):
        store.offload_state_dict(tmp_path, {"old": torch.ones(3), "new": torch.ones(2)})
    after = _listing(tmp_path)
    assert after["index.json"] == before["index.json"] and set(after) <= {*before, "new.dat"}
    assert torch.equal(store.OffloadedWeightsLoader(save_folder=tmp_path)["kept"], torch.ones(1))


def test_a_full_disk_while_dispatching_leaves_the_model_whole(full_disk, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    x = torch.randn(1, 8)
    plain = model(x)
    for call in (
        lambda: disk_offload(model, tmp_path / "o"),
        lambda: dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path / "o"),
    ):
        full_disk(260)
        with pytest.raises(OSError, match="failed: No space left"):
            call()
        assert not any("_hf_hook" in module.__dict__ for module in model.modules())
        assert torch.equal(model(x), plain) and _listing(tmp_path) == {}


def test_a_block_that_raises_publishes_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), store.OffloadWriter(tmp_path) as writer:
        writer.add("a", torch.ones(2))
        raise RuntimeError("stop")
    with pytest.raises(ValueError, match="'b' is on the meta device"):
        store.offload_state_dict(tmp_path, {"a": torch.ones(2), "b": torch.empty(1, device="meta")})
    store.save_offload_index({}, tmp_path)
    store.save_offload_index(None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_written_once_and_those_of_another_model_are_reported(tmp_path, caplog):
    model = nn.BatchNorm1d(2)
    index = write_missing(model, [""], False, tmp_path)
    before = {name: os.stat(tmp_path / name).st_mtime_ns for name in os.listdir(tmp_path)}
    assert set(before) == {"weight.dat", "bias.dat", "index.json"}
    with caplog.at_level(logging.WARNING):
        assert write_missing(model, [""], False, tmp_path) == index and caplog.text == ""
        assert {name: os.stat(tmp_path / name).st_mtime_ns for name in os.listdir(tmp_path)} == before
        nn.init.ones_(model.bias)
        write_missing(model, [""], True, tmp_path)
    assert caplog.text.count("they differ in bias. Use an empty folder") == 1
    assert set(json.loads((tmp_path / "index.json").read_text())) == set(model.state_dict())


def test_a_folder_of_a_model_of_other_shapes_is_refused(tmp_path):
    disk_offload(nn.Linear(2, 2), tmp_path)
    before = _listing(tmp_path)
    model = nn.Sequential()
    model.weight, model.other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1))
    weight = model.weight
    for call in (
        lambda: disk_offload(model, tmp_path),
        lambda: dispatch_model(model, {"": "disk"}, offload_dir=tmp_path),
    ):
        with pytest.raises(ValueError, match=r"index.json of .* does not belong to .*weight has shape \(2, 2\)"):
            call()
        assert model.weight is weight and "_hf_hook" not in model.__dict__ and _listing(tmp_path) == before


# --- weights by name ---


def test_the_loader_prefers_memory_and_is_a_mapping(tmp_path):
    store.offload_state_dict(tmp_path, {"a": torch.zeros(1)})
    store.offload_state_dict(tmp_path, {"b": torch.zeros(2)})  # the index grows
    loader = store.OffloadedWeightsLoader(state_dict={"a": torch.ones(1)}, save_folder=tmp_path)
    assert list(loader) == ["a", "b"] and len(loader) == 2 and "b" in loader and "c" not in loader
    assert {name: float(tensor.sum()) for name, tensor in dict(loader).items()} == {"a": 1.0, "b": 0.0}
    for arguments, error, message in (
        ({}, ValueError, "state_dict"),
        ({"save_folder": tmp_path / "no"}, FileNotFoundError, r"index\.json"),
        ({"index": {"c": {"dtype": "float32", "shape": [1]}}}, ValueError, "save_folder"),
        ({"save_folder": tmp_path}, KeyError, "c"),
    ):
        with pytest.raises(error, match=message):
            store.OffloadedWeightsLoader(**arguments)["c"]


def test_a_prefixed_view_reads_short_names_and_lists_full_ones():
    view = store.PrefixedDataset({"x.a": 1, "x.b": 2, "y": 3}, "x.")
    assert view["a"] == view["x.a"] == 1 and "b" in view and "y" not in view and 3 not in view
    assert list(view) == ["x.a", "x.b"] and len(view) == 2 and dict(view) == {"x.a": 1, "x.b": 2}
    with pytest.raises(KeyError):
        view["y"]


# --- files of checkpoints, read where they are ---


@pytest.fixture
def path(tmp_path):
    save_file({"w": torch.arange(6.0), "b": torch.ones(2).bfloat16()}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def _mapped_at(tensor, known):
    """The file whose mapping holds a tensor's first byte; where the system does not say, what is known."""
    if not os.path.exists("/proc/self/maps"):
        return known
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return line.rstrip("\n").rpartition("/")[2]
    return None


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_are_mapped_if_they_can_be(legacy, tmp_path):
    state = {"w": torch.arange(6.0), "extra": {"not": "a tensor"}}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=not legacy)
    file = store.WeightFile(tmp_path / "m.bin")
    assert not file.in_place and torch.equal(file.tensor("w"), torch.arange(6.0))
    assert (_mapped_at(file.tensor("w"), None if legacy else "m.bin") == "m.bin") is not legacy
    with pytest.raises(KeyError, match="no tensor 'x'"):
        file.tensor("x")


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
def test_truncated_files_and_what_is_no_state_dict_are_named(name, path, tmp_path):
    torch.save([torch.ones(600)], tmp_path / "m.bin")
    data = (tmp_path / name).read_bytes()
    for share in (0, 0.02, 0.5, 0.99, *([1] if name == "m.bin" else [])):
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ValueError, match=rf"{name} \([\d,]+ bytes\) is truncated or no"):
            store.WeightFile(tmp_path / name)


def test_a_file_that_is_replaced_stays_what_it_was_for_those_that_use_it(path, tmp_path):
    index = {"w": {"safetensors_file": str(path)}}
    loader = store.OffloadedWeightsLoader(index=index)
    first = loader["w"]
    assert loader["w"] is first
    save_file({"w": torch.zeros(6)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert loader["w"] is first and torch.equal(first, torch.arange(6.0))
    assert not store.OffloadedWeightsLoader(index=index)["w"].any()
    os.unlink(path)
    assert torch.equal(loader["w"], torch.arange(6.0))


def test_an_entry_that_is_replaced_is_mapped_anew_and_casts_are_not_kept(path):
    entry = {"safetensors_file": str(path), "dtype": "float32"}
    loader = store.OffloadedWeightsLoader(index={"w": entry})
    assert loader["w"] is loader["w"]
    loader.index["w"] = {**entry, "weight_name": "b"}
    assert torch.equal(loader["w"], torch.ones(2)) and loader["w"].dtype is torch.float32
    assert loader["w"] is not loader["w"] and loader.stored("w").dtype is torch.bfloat16
    assert torch.equal(pickle.loads(pickle.dumps(loader))["w"], torch.ones(2))
    assert store.OffloadedWeightsLoader(index={"w": entry}, device="meta")["w"].is_meta


# --- weights that are quantised to 8 bits on their way to a folder ---


def test_a_quantised_weight_travels_with_its_scales(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    weight, scales, index = torch.ones(2, 2, dtype=torch.int8), torch.full((2,), 3.0), {}
    quantize_and_offload_8bit(model, weight, "0.weight", torch.float16, tmp_path, index, scales)
    assert set(index) == {"0.weight", "0.SCB"} and index["0.weight"]["dtype"] == "int8"
    assert model[0].weight.is_meta and model[0].weight.dtype is torch.int8
    load_offloaded_weights(model, index, tmp_path)
    assert model[0].weight.dtype is torch.int8 and torch.equal(model[0].weight.SCB, scales)


def test_other_tensors_are_written_in_the_dtype_wanted(tmp_path):
    model, index = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {}
    quantize_and_offload_8bit(model, torch.ones(2), "0.bias", torch.float16, tmp_path, index, None)
    quantize_and_offload_8bit(model, torch.ones(2).half(), "1.running_mean", None, tmp_path, index, None)
    quantize_and_offload_8bit(model, torch.tensor(3), "1.num_batches_tracked", torch.float16, tmp_path, index, None)
    dtypes = {name: entry["dtype"] for name, entry in index.items()}
    assert dtypes == {"0.bias": "float16", "1.running_mean": "float32", "1.num_batches_tracked": "int64"}
    assert model[0].bias.is_meta and model[0].bias.dtype is torch.float16 and model[0].bias.requires_grad
    assert model[1].running_mean.is_meta and model[1].num_batches_tracked.is_meta


def test_tensors_without_data_are_named(caplog):
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    with caplog.at_level(logging.WARNING):
        get_state_dict_offloaded_model(model)
    assert "0.bias, 0.weight, 1.weight" in caplog.text
    # A hook that does not have the weight does not help; one that does, does.
    add_hook_to_module(model[1], AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(4, 4)}))
    model[0]._hf_hook = AlignDevicesHook("cpu", offload=True, weights_map={"bias": torch.ones(4)})
    caplog.clear()
    get_state_dict_offloaded_model(model)
    assert caplog.messages[0].endswith("on the meta device: 0.weight")
