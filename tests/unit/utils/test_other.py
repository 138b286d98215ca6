"""Saving, loading, and small helpers."""

import io
import logging
import os
import pickle

import numpy as np
import pytest
import torch

from accelerate.state import PartialState
from accelerate.utils import other


class Foo:
    pass


def test_save_and_load(tmp_path):
    state = np.random.get_state()
    other.save({"a": torch.ones(2), "n": 3, "random": state}, tmp_path / "ours")
    loaded = other.load(tmp_path / "ours")
    assert torch.equal(loaded["a"], torch.ones(2)) and loaded["n"] == 3
    assert loaded["random"][0] == state[0] and np.array_equal(loaded["random"][1], state[1])
    assert other.load(tmp_path / "ours", map_location="meta")["a"].is_meta
    with open(tmp_path / "plain", "wb") as file:
        other.save([1, 2], file)
    assert other.load(tmp_path / "plain") == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["ours", "plain"]
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_leaves_the_old_file(tmp_path):
    other.save("old", tmp_path / "file")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        other.save(lambda: None, tmp_path / "file")
    assert other.load(tmp_path / "file") == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"optimizer": Foo()}, tmp_path / "file")
    with pytest.raises(pickle.UnpicklingError):
        other.load(tmp_path / "file")
    assert isinstance(other.load(tmp_path / "file", weights_only=False)["optimizer"], Foo)


def test_arrays_are_numpys_own_wherever_they_stand_in_a_file(tmp_path):
    array = np.arange(3)
    value = {"deep": [({"a": array},), (1, (array, "x"))], "state": ("MT", array, 624), "plain": (1, 2)}
    value["itself"] = value
    ring = []
    value["ring"] = (ring, array)
    ring.append({"back": ring, "with": (array, 1)})
    other.save(value, tmp_path / "f")
    (found, again) = other.load_each([tmp_path / "f", tmp_path / "f"])
    deep = found["deep"]
    arrays = [deep[0][0]["a"], deep[1][1][0], found["state"][1]]
    assert all(type(one) is np.ndarray and one is arrays[0] and one.tolist() == [0, 1, 2] for one in arrays)
    assert found["ring"][1] is arrays[0] and found["ring"][0][0]["with"][0] is arrays[0]
    assert found["itself"] is found and found["plain"] == (1, 2) and deep[1][1][1] == "x"
    assert again["state"][1] is not arrays[0] and type(again["state"][1]) is np.ndarray


def test_save_warns_once_of_tensors_that_share_memory(tmp_path, caplog):
    PartialState(cpu=True)
    weight = torch.arange(4.0)
    state = {"first": weight, "tied": weight, "part": weight[:2], "other": torch.ones(1)}
    other.save(state, tmp_path / "shared.safetensors", safe_serialization=True)
    (record,) = caplog.records
    assert record.name == "accelerate.utils.other" and record.levelno == logging.WARNING
    assert "Removed shared tensor tied, " in record.message and "Copied shared tensor part, " in record.message
    other.save({"first": weight}, tmp_path / "plain.safetensors", safe_serialization=True)
    assert len(caplog.records) == 1


def test_save_refuses_a_binary_file_for_safetensors():
    PartialState(cpu=True)
    file = io.BytesIO()
    with pytest.raises(TypeError, match="safe_serialization=True needs a path.*BytesIO"):
        other.save({"weight": torch.ones(1)}, file, safe_serialization=True)
    assert file.getvalue() == b""
