"""Offload folders, filled in one step."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate.big_modeling import disk_offload, dispatch_model
from accelerate.offload import store as writer_module
from accelerate.offload.store import (
    OffloadedWeightsLoader,
    OffloadWriter,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    read_index,
    save_offload_index,
)
from accelerate.offload.weights import write_missing


def _listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


@pytest.mark.parametrize("after", [0, 10, 400, 420])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_the_folder_as_it_was(after, there, full_disk, tmp_path):
    folder = tmp_path / "deep" / "offload"
    if there:
        offload_state_dict(folder, {"a": torch.zeros(3), "kept": torch.ones(1)})
    before = _listing(tmp_path)
    full_disk(after)
    with pytest.raises(
        OSError, match=r"Offloading .* to .*offload failed: No space left.*Nothing of it was kept"
    ) as caught:
        offload_state_dict(folder, {"a": torch.ones(100), "b": torch.ones(5)})
    assert caught.value.errno == errno.ENOSPC
    assert _listing(tmp_path) == before and (tmp_path / "deep").exists() == there


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
        assert torch.equal(model(x), plain) and list(tmp_path.iterdir()) == []


def test_a_block_that_raises_publishes_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), OffloadWriter(tmp_path / "o") as writer:
        writer.add("a", torch.ones(2))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="'b' is on the meta device"):
        offload_state_dict(tmp_path / "o", {"a": torch.ones(2), "b": torch.empty(1, device="meta")})
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_verified_when_they_are_first_read(tmp_path):
    index = offload_weight(torch.arange(4.0), "w", tmp_path, index={})
    data = bytearray((tmp_path / "w.dat").read_bytes())
    data[5] ^= 1
    (tmp_path / "w.dat").write_bytes(data)
    with pytest.raises(ValueError, match=r"w\.dat is damaged"):
        load_offloaded_weight(tmp_path / "w.dat", index["w"])
    # Entries of other versions have no checksum.
    load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float32", "shape": [4]})
    (tmp_path / "w.dat").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="has 15 bytes"):
        load_offloaded_weight(tmp_path / "w.dat", index["w"])


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', "\x00"])
def test_a_damaged_index_is_named_and_kept(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    for call in (lambda: read_index(tmp_path), lambda: save_offload_index({"a": {}}, tmp_path)):
        with pytest.raises(ValueError, match=r"index\.json is no index"):
            call()
    assert _listing(tmp_path) == {"index.json": text.encode()}


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
        with pytest.raises(
            ValueError, match=r"index.json of .* does not belong to this model.*weight has shape \(2, 2\)"
        ):
            call()
        assert model.weight is weight and "_hf_hook" not in model.__dict__ and _listing(tmp_path) == before


@pytest.mark.parametrize("name", ["../w", "a/b", "/w", "w\0"])
def test_no_name_leads_out_of_the_folder(name, tmp_path):
    folder = tmp_path / "o"
    for call in (
        lambda: offload_state_dict(folder, {"a": torch.ones(1), name: torch.ones(1)}),
        lambda: offload_weight(torch.ones(1), name, folder),
    ):
        with pytest.raises(ValueError, match="cannot be a file in"):
            call()
    assert list(tmp_path.iterdir()) == []
    index = {name: {"dtype": "float32", "shape": [1]}}
    (tmp_path / "w.dat").write_bytes(bytes(4))
    with pytest.raises(ValueError, match="cannot be a file in"):
        OffloadedWeightsLoader(save_folder=folder, index=index)[name]


def test_names_that_cannot_be_published_are_known_before_anything_is(tmp_path):
    (tmp_path / "taken.dat").mkdir()
    for name, error in (("w" * 300, "name too long"), ("taken", "Is a directory")):
        with pytest.raises(OSError, match=error):
            offload_state_dict(tmp_path, {"a": torch.ones(1), name: torch.ones(1)})
        assert _listing(tmp_path) == {}
    name = "\u4e00" * 80
    offload_state_dict(tmp_path, {name: torch.ones(1)})
    assert f"{name}.dat" in _listing(tmp_path)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_disk_that_fails_while_files_get_their_names(fails_at, tmp_path, monkeypatch):
    real, calls = os.replace, []

    def fails(source, target):
        calls.append(target)
        if len(calls) > fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(writer_module.os, "replace", fails)
    with pytest.raises(OSError, match=r"Offloading .* failed: No space left"):
        offload_state_dict(tmp_path / "o", {"a": torch.ones(1), "b": torch.ones(1)})
    assert len(calls) == fails_at + 1 and list(tmp_path.iterdir()) == []
