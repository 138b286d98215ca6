"""Weights read where they are."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from accelerate.offload import files
from accelerate.offload.files import WeightFile
from accelerate.offload.store import OffloadedWeightsLoader


@pytest.fixture(autouse=True)
def look_at_every_use(monkeypatch):
    monkeypatch.setattr(files, "CHECK_EVERY", 0.0)


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
    file = WeightFile(path)
    assert file.describe() == {"w": ((6,), torch.float32), "b": ((2,), torch.bfloat16)}
    tensor = file.tensor("w")
    assert torch.equal(tensor, torch.arange(6.0))
    if os.path.exists("/proc/self/maps"):
        assert _mapped_at(tensor) == "m.safetensors"
    tensor.zero_()
    assert torch.equal(WeightFile(path).tensor("w"), torch.arange(6.0))


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_are_mapped_if_they_can_be(legacy, tmp_path):
    state = {"w": torch.arange(6.0), "extra": {"not": "a tensor"}}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=not legacy)
    file = WeightFile(tmp_path / "m.bin")
    assert not file.in_place and file.describe() == {"w": ((6,), torch.float32)}
    # What cannot be mapped is not held in memory between its description and its use.
    assert (file._tensors is None) == legacy
    assert torch.equal(file.tensor("w"), torch.arange(6.0))
    file.close()
    assert (file._tensors is None) == legacy
    with pytest.raises(KeyError, match="no tensor 'x'"):
        file.tensor("x")


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.99])
def test_truncated_files_are_named(name, share, path, tmp_path):
    if name == "m.bin":
        torch.save({"w": torch.arange(600.0)}, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=rf"{name} \([\d,]+ bytes\) is truncated or no"):
        WeightFile(tmp_path / name)


def test_what_is_no_state_dict_is_refused(tmp_path):
    for number, content in enumerate(([torch.ones(1)], {"epoch": 3})):
        torch.save(content, tmp_path / f"{number}.bin")
        with pytest.raises(ValueError, match="no state dict"):
            WeightFile(tmp_path / f"{number}.bin").describe()
    with pytest.raises(FileNotFoundError, match=r"absent\.bin does not exist"):
        WeightFile(tmp_path / "absent.bin")


def test_a_file_that_is_replaced_is_still_read_and_one_that_is_rewritten_is_refused(path, tmp_path, monkeypatch):
    loader = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(path)}})
    first = loader["w"]
    assert loader["w"] is first
    save_file({"w": torch.zeros(6)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert loader["w"] is first and torch.equal(first, torch.arange(6.0))
    other = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(path)}})
    assert not other["w"].any()
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(1, 1))  # clocks of file systems may be too coarse to tell
    with pytest.raises(RuntimeError, match="was changed while weights in it are in use"):
        other["w"]
    monkeypatch.setattr(files, "CHECK_EVERY", 3600)
    with pytest.raises(RuntimeError, match="was changed while weights in it are in use"):
        other["w"]  # nor later, however soon
    os.unlink(path)
    assert torch.equal(loader["w"], torch.arange(6.0))


def test_an_entry_that_is_replaced_is_mapped_anew_and_casts_are_not_kept(path):
    index = {"w": {"safetensors_file": str(path), "dtype": "float32"}}
    loader = OffloadedWeightsLoader(index=index)
    assert loader["w"] is loader["w"]
    loader.index["w"] = {"safetensors_file": str(path), "weight_name": "b", "dtype": "float32"}
    assert torch.equal(loader["w"], torch.ones(2)) and loader["w"].dtype is torch.float32
    assert loader["w"] is not loader["w"] and loader.stored("w").dtype is torch.bfloat16
    again = pickle.loads(pickle.dumps(loader))
    assert torch.equal(again["w"], torch.ones(2))


def test_what_is_mapped_in_inference_mode_works_outside_of_it(path):
    loader = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(path)}})
    with torch.inference_mode():
        assert not loader["w"].is_inference()
    x = torch.ones(6, requires_grad=True)
    (x * loader["w"]).sum().backward()
    assert torch.equal(x.grad, torch.arange(6.0))
