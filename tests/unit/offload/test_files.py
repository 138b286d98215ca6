"""Weights read where they are."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from accelerate.offload.files import WeightFile
from accelerate.offload.store import OffloadedWeightsLoader


@pytest.fixture
def path(tmp_path):
    save_file({"w": torch.arange(6.0), "b": torch.ones(2).bfloat16()}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def _mapped_at(tensor):
    """The file whose mapping holds a tensor's first byte."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return line.rstrip("\n").rpartition("/")[2]
    return None


def test_tensors_are_views_of_the_file(path):
    tensor = WeightFile(path).tensor("w")
    if os.path.exists("/proc/self/maps"):
        assert _mapped_at(tensor) == "m.safetensors"
    tensor.zero_()
    assert torch.equal(WeightFile(path).tensor("w"), torch.arange(6.0))


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_are_mapped_if_they_can_be(legacy, tmp_path):
    state = {"w": torch.arange(6.0), "extra": {"not": "a tensor"}}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=not legacy)
    file = WeightFile(tmp_path / "m.bin")
    assert not file.in_place and torch.equal(file.tensor("w"), torch.arange(6.0))
    if os.path.exists("/proc/self/maps"):
        assert (_mapped_at(file.tensor("w")) == "m.bin") is not legacy
    with pytest.raises(KeyError, match="no tensor 'x'"):
        file.tensor("x")


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
def test_truncated_files_and_what_is_no_state_dict_are_named(name, path, tmp_path):
    torch.save([torch.ones(600)], tmp_path / "m.bin")
    data = (tmp_path / name).read_bytes()
    for share in (0, 0.02, 0.5, 0.99, *([1] if name == "m.bin" else [])):
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ValueError, match=rf"{name} \([\d,]+ bytes\) is truncated or no"):
            WeightFile(tmp_path / name)


def test_a_file_that_is_replaced_stays_what_it_was_for_those_that_use_it(path, tmp_path):
    index = {"w": {"safetensors_file": str(path)}}
    loader = OffloadedWeightsLoader(index=index)
    first = loader["w"]
    assert loader["w"] is first
    save_file({"w": torch.zeros(6)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert loader["w"] is first and torch.equal(first, torch.arange(6.0))
    assert not OffloadedWeightsLoader(index=index)["w"].any()
    os.unlink(path)
    assert torch.equal(loader["w"], torch.arange(6.0))


def test_an_entry_that_is_replaced_is_mapped_anew_and_casts_are_not_kept(path):
    loader = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(path), "dtype": "float32"}})
    assert loader["w"] is loader["w"]
    loader.index["w"] = {"safetensors_file": str(path), "weight_name": "b", "dtype": "float32"}
    assert torch.equal(loader["w"], torch.ones(2)) and loader["w"].dtype is torch.float32
    assert loader["w"] is not loader["w"] and loader.stored("w").dtype is torch.bfloat16
    assert torch.equal(pickle.loads(pickle.dumps(loader))["w"], torch.ones(2))


def test_what_is_mapped_in_inference_mode_works_outside_of_it(path):
    loader = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(path)}})
    with torch.inference_mode():
        assert not loader["w"].is_inference()
    x = torch.ones(6, requires_grad=True)
    (x * loader["w"]).sum().backward()
    assert torch.equal(x.grad, torch.arange(6.0))
