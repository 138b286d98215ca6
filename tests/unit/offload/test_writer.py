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


@pytest.mark.parametrize("after", [0, 400, 420])
def test_a_full_disk_leaves_the_files_as_they_were(after, full_disk, tmp_path):
    folder = tmp_path / "deep" / "offload"
    offload_state_dict(folder, {"a": torch.zeros(3), "kept": torch.ones(1)})
    before = _listing(tmp_path)
    full_disk(after)
    with pytest.raises(
        OSError, match=r"Offloading .* to .*offload failed: No space left.*Nothing of it was"
    ) as caught:
        offload_state_dict(folder, {"a": torch.ones(100), "b": torch.ones(5)})
    assert caught.value.errno == errno.ENOSPC and _listing(tmp_path) == before


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
    with pytest.raises(RuntimeError, match="stop"), OffloadWriter(tmp_path) as writer:
        writer.add("a", torch.ones(2))
        raise RuntimeError("stop")
    with pytest.raises(ValueError, match="'b' is on the meta device"):
        offload_state_dict(tmp_path, {"a": torch.ones(2), "b": torch.empty(1, device="meta")})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_off_and_an_index_that_is_none_are_named(tmp_path):
    index = offload_weight(torch.arange(4.0), "w", tmp_path, index={})
    (tmp_path / "w.dat").write_bytes(bytes(15))
    with pytest.raises(ValueError, match="has 15 bytes"):
        load_offloaded_weight(tmp_path / "w.dat", index["w"])
    for text in ("{", '{"a": 1}'):
        (tmp_path / "index.json").write_text(text)
        for call in (lambda: read_index(tmp_path), lambda: save_offload_index({"a": {}}, tmp_path)):
            with pytest.raises(ValueError, match=r"index\.json is no index"):
                call()
        assert (tmp_path / "index.json").read_text() == text


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


@pytest.mark.parametrize("name", ["../w", "a/b", "/w", "w\0"])
def test_no_name_leads_out_of_the_folder(name, tmp_path):
    folder = tmp_path / "o"
    index = {name: {"dtype": "float32", "shape": [1]}}
    (tmp_path / "w.dat").write_bytes(bytes(4))
    for call in (
        lambda: offload_state_dict(folder, {"a": torch.ones(1), name: torch.ones(1)}),
        lambda: offload_weight(torch.ones(1), name, folder),
        lambda: OffloadedWeightsLoader(save_folder=folder, index=index)[name],
    ):
        with pytest.raises(ValueError, match="cannot be a file in"):
            call()
    assert list(_listing(tmp_path)) == ["w.dat"]
