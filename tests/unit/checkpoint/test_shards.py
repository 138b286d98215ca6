"""Metadata that lies about pieces of tensors, and reading by several threads."""

import contextlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata

import sharded_io
from accelerate.checkpoint import shards
from accelerate.checkpoint.manifest import DamagedCheckpoint


@pytest.fixture
def saved(tmp_path):
    """Weights of 64 rows in two pieces, as two ranks write them."""
    torch.manual_seed(0)
    model, folder = nn.Linear(4, 64), tmp_path / "pytorch_model_fsdp_0"
    parts = {"0": model.weight[:32].detach().clone(), "1": model.weight[32:].detach().clone(), "bias": model.bias}
    dcp.save(parts, checkpoint_id=folder, no_dist=True)
    told = pickle.loads((folder / ".metadata").read_bytes())
    pieces = {}
    for number in (0, 1):
        offset = torch.Size([32 * number, 0])
        place = told.storage_data.pop(metadata.MetadataIndex(str(number), torch.Size([0, 0])))
        told.storage_data[metadata.MetadataIndex("model.weight", offset)] = place
        pieces[number] = metadata.ChunkStorageMetadata(offset, torch.Size([32, 4]))
        whole = told.state_dict_metadata.pop(str(number))
    whole = metadata.TensorStorageMetadata(whole.properties, torch.Size([64, 4]), list(pieces.values()))
    told.state_dict_metadata["model.weight"] = whole
    told.planner_data = {"model.weight": ("model", "weight"), "bias": ("model", "bias")}
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    return folder


def rewrite(saved, change):
    path = saved / ".metadata"
    told = pickle.loads(path.read_bytes())
    change(told)
    path.write_bytes(pickle.dumps(told))


def chunks(told):
    return told.state_dict_metadata["model.weight"].chunks


def moved(told, offsets, sizes):
    """Let the second piece lie elsewhere, and the files agree."""
    index = next(index for index in told.storage_data if index.fqn == "model.weight" and index.offset[0])
    place = told.storage_data.pop(index)
    told.storage_data[metadata.MetadataIndex("model.weight", torch.Size(offsets))] = place
    chunks(told)[1] = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda told: setattr(chunks(told)[1], "offsets", torch.Size((0, 0))), "of its 256 elements 128 are"),
        (lambda told: moved(told, (32, 0), (16, 4)), "of its 256 elements 192 are"),
        (lambda told: told.planner_data.update({"model.weight": ()}), "could not be read"),
        (lambda told: setattr(told.state_dict_metadata["model.weight"], "size", (1 << 70, 4)), "is not whole"),
        (lambda told: setattr(told.state_dict_metadata["model.weight"], "properties", None), "could not be read"),
        (
            lambda told: setattr(told.state_dict_metadata["model.weight"].properties, "dtype", "F32"),
            "has the dtype 'F32'",
        ),
    ],
)
def test_pieces_that_lie(saved, change, match):
    rewrite(saved, change)
    model = nn.Linear(4, 64)
    before = model.weight.clone()
    with pytest.raises(DamagedCheckpoint, match=match):
        sharded_io.load_model(model, saved.parent)
    assert torch.equal(before, model.weight)


def test_pieces_that_are_told_twice_are_one(saved):
    rewrite(saved, lambda told: chunks(told).append(chunks(told)[0]))
    model = nn.Linear(4, 64)
    sharded_io.load_model(model, saved.parent)
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(4, 64).weight)


def test_threads_that_read_at_a_time_get_their_own(tmp_path, monkeypatch):
    """Torch writes several files in as many threads; one read along what another had asked for, which did not wait for it."""
    both, returned, read_data = threading.Barrier(2), threading.Event(), dcp.FileSystemReader.read_data

    class Asking(shards.Stored):
        def whole(self, value):
            made = super().whole(value)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)
            return made

    def slow(reader, plan, planner):
        if len(plan.items) > 1:
            returned.wait(1)
        return read_data(reader, plan, planner)

    expected = {name: torch.full((5,), value) for name, value in (("a", 1.0), ("b", 2.0))}
    shards.save({"model": expected}, tmp_path)
    stored = Asking.in_folder(tmp_path)
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", slow)

    def read(name):
        value = stored.read(stored.state["model"][name]).clone()
        returned.set()
        return value

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip("ab", pool.map(read, "ab"), strict=True))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
