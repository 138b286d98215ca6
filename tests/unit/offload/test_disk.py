"""Weights in files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from accelerate.offload.store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

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


@pytest.mark.parametrize("name", TENSORS)
def test_every_dtype_and_shape_comes_back(name, tmp_path):
    index = offload_weight(TENSORS[name], name, tmp_path, index={})
    loaded = load_offloaded_weight(tmp_path / f"{name}.dat", index[name])
    assert loaded.dtype is TENSORS[name].dtype and loaded.shape == TENSORS[name].shape
    assert torch.equal(
        loaded.float() if name == "float8" else loaded, TENSORS[name].float() if name == "float8" else TENSORS[name]
    )


def test_bfloat16_bytes_are_those_of_int16(tmp_path):
    weight = torch.randn(4).bfloat16()
    offload_weight(weight, "w", tmp_path)
    assert (tmp_path / "w.dat").read_bytes() == weight.view(torch.int16).numpy().tobytes()


def test_rewriting_a_weight_does_not_change_a_loaded_one(tmp_path):
    index = offload_weight(torch.zeros(1000), "w", tmp_path, index={})
    loaded = load_offloaded_weight(tmp_path / "w.dat", index["w"])
    offload_weight(torch.ones(10), "w", tmp_path, index=index)
    assert (loaded == 0).all()
    loaded.add_(1)
    assert (load_offloaded_weight(tmp_path / "w.dat", index["w"]) == 1).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.dat"]


def test_missing_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="'w' is on the meta device"):
        offload_weight(torch.empty(1, device="meta"), "w", tmp_path)
    with pytest.raises(FileNotFoundError, match="w.dat"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float32", "shape": [1]})


def test_the_index_grows_and_empty_ones_write_nothing(tmp_path):
    save_offload_index({}, tmp_path)
    save_offload_index(None, tmp_path)
    assert list(tmp_path.iterdir()) == []
    offload_state_dict(tmp_path / "deep" / "er", {"a": torch.ones(1)})
    offload_state_dict(tmp_path / "deep" / "er", {"b": torch.ones(2)})
    index = json.loads((tmp_path / "deep" / "er" / "index.json").read_text())
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in index.items()} == {
        "a": ("float32", [1]),
        "b": ("float32", [2]),
    }


def test_the_loader_prefers_memory_and_is_a_mapping(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(2)})
    loader = OffloadedWeightsLoader(state_dict={"a": torch.ones(1)}, save_folder=tmp_path)
    assert list(loader) == ["a", "b"] and len(loader) == 2 and "b" in loader and "c" not in loader
    assert {name: float(tensor.sum()) for name, tensor in dict(loader).items()} == {"a": 1.0, "b": 0.0}
    with pytest.raises(KeyError):
        loader["c"]


def test_the_loader_reads_safetensors_in_place(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    entry = {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "w"}
    loader = OffloadedWeightsLoader(index={"x.w": entry, "h": {**entry, "dtype": "float16"}})
    assert torch.equal(loader["x.w"], torch.ones(2))
    assert loader["h"].dtype is torch.float16


def test_the_loader_needs_a_source(tmp_path):
    with pytest.raises(ValueError, match="state_dict"):
        OffloadedWeightsLoader()
    with pytest.raises(FileNotFoundError, match="index.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ValueError, match="save_folder"):
        OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [1]}})["a"]


def test_a_prefixed_view_reads_short_names_and_lists_full_ones():
    view = PrefixedDataset({"x.a": 1, "x.b": 2, "y": 3}, "x.")
    assert view["a"] == 1 and "b" in view and "y" not in view
    assert list(view) == ["x.a", "x.b"] and len(view) == 2 and dict(view) == {"x.a": 1, "x.b": 2}


def test_submodules_are_matched_by_name_not_by_text():
    state = {"a.b": 1, "a": 2, "ab": 3, "d.e": 4}
    assert extract_submodules_state_dict(state, ["a", "d"]) == {"a.b": 1, "a": 2, "d.e": 4}
    assert extract_submodules_state_dict(state, [""]) == state
    assert extract_submodules_state_dict(state, "d") == {"d.e": 4}
