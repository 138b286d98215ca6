"""What is collected is written as it was, also when the run has gone on meanwhile."""

import os
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file

from accelerate.checkpoint import durable
from accelerate.checkpoint.parcel import HostBuffers, Parcel


def filled(folder) -> tuple[Parcel, dict, dict]:
    weights = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)[1:3]}
    state = {"state": OrderedDict({0: {"m": torch.ones(3), "view": weights["w"].t()}}), "lr": [0.1, (1, "x", None)]}
    parcel = Parcel(str(folder), rank=2)
    parcel.add_tensors("model.safetensors", weights, metadata={"format": "pt"}, aliases={"tied": "w"})
    parcel.add_object("optimizer.bin", state)
    return parcel, weights, state


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("copied", [False, True])
def test_written_as_it_was(tmp_path, writers, copied):
    parcel, weights, state = filled(tmp_path)
    buffers = HostBuffers()
    if copied:
        parcel.snapshot(buffers)
        for tensor in (weights["w"], weights["b"], state["state"][0]["m"]):
            tensor.zero_()
        state["lr"][0], state["state"][0]["new"] = 7.0, 1
    entries = parcel.write(writers)
    found = load_file(tmp_path / "model.safetensors")
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["b"].tolist() == [1, 2]
    read = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert read["state"][0]["m"].tolist() == [1, 1, 1] and read["lr"] == [0.1, (1, "x", None)]
    assert read["state"][0]["view"].tolist() == [[0, 3], [1, 4], [2, 5]] and "new" not in read["state"][0]
    assert type(read["state"]) is OrderedDict
    assert set(entries) == set(os.listdir(tmp_path)) and entries["model.safetensors"].aliases == {"tied": "w"}
    assert {entry.rank for entry in entries.values()} == {2}


def test_memory_is_used_again_and_views_share_a_copy(tmp_path):
    buffers, addresses = HostBuffers(), []
    base = torch.zeros(1000)
    for _ in range(3):
        parcel = Parcel(str(tmp_path))
        parcel.add_object("f", {"all": base, "part": base[10:], "other": torch.ones(50)})
        parcel.snapshot(buffers)
        copied = parcel._jobs["f"][1]
        assert copied["all"].untyped_storage().data_ptr() == copied["part"].untyped_storage().data_ptr()
        assert copied["all"].data_ptr() != base.data_ptr()
        addresses.append((copied["all"].data_ptr(), copied["other"].data_ptr()))
        buffers.release()
    assert len(set(addresses)) == 1


def test_what_the_last_save_did_not_use_is_let_go():
    buffers = HostBuffers()
    for size in (100, 200):
        buffers.copy(torch.zeros(size, dtype=torch.uint8).untyped_storage())
        buffers.release()
    assert [key[0] for key in buffers._free] == [200]


class Odd:
    """Something with a state of its own."""

    def __init__(self):
        self.numbers = [1]


def test_other_objects_are_copied_too():
    odd, buffers = Odd(), HostBuffers()
    sparse = torch.eye(2).to_sparse()
    parcel = Parcel("folder")
    parcel.add_object("f", {"odd": odd, "sparse": sparse, "conj": torch.ones(1, dtype=torch.complex64).conj()})
    parcel.snapshot(buffers)
    odd.numbers.append(2)
    copied = parcel._jobs["f"][1]
    assert copied["odd"].numbers == [1] and torch.equal(copied["sparse"].to_dense(), torch.eye(2))
    assert copied["conj"].is_conj()


def test_a_parcel_is_a_path_and_refuses_at_once_what_cannot_be_stored():
    parcel = Parcel("folder")
    assert os.path.join(parcel, "x") == os.path.join("folder", "x")
    with pytest.raises(TypeError, match="'odd'"):
        parcel.add_tensors("f", {"odd": 3})


def test_an_error_of_one_file_comes_out(tmp_path, monkeypatch):
    parcel, *_ = filled(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space")

    monkeypatch.setattr(durable.DurableFile, "write", fail)
    with pytest.raises(OSError, match="no space"):
        parcel.write()
