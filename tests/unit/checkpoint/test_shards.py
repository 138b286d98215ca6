"""Metadata that lies about pieces of tensors, or is too large or too deep to be true."""

import contextlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata

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


def refused(saved, change, match):
    path = saved / ".metadata"
    told = pickle.loads(path.read_bytes())
    changed = change(told)
    path.write_bytes(pickle.dumps(told) if changed is None else changed)
    model = nn.Linear(4, 64)
    before = model.weight.clone()
    with pytest.raises(DamagedCheckpoint, match=match):
        sharded_io.load_model(model, saved.parent)
    assert torch.equal(before, model.weight)


def chunks(told):
    return told.state_dict_metadata["model.weight"].chunks


def moved(told, offsets, sizes):
    """Let the second piece lie elsewhere, and the files agree."""
    index = next(index for index in told.storage_data if index.fqn == "model.weight" and index.offset[0])
    place = told.storage_data.pop(index)
    told.storage_data[metadata.MetadataIndex("model.weight", torch.Size(offsets))] = place
    chunks(told)[1] = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def one_place(told):
    first, second = (index for index in told.storage_data if index.fqn == "model.weight")
    told.storage_data[second] = told.storage_data[first]


def many_pieces_of_one_place(told):
    """Far more than the files have, in pieces that each are in one."""
    told.state_dict_metadata["model.weight"].size = torch.Size([32 << 20, 4])
    place = next(place for index, place in told.storage_data.items() if index.fqn == "model.weight")
    for number in range(2, 200):
        offset = torch.Size([32 * number, 0])
        chunks(told).append(metadata.ChunkStorageMetadata(offset, torch.Size([32, 4])))
        told.storage_data[metadata.MetadataIndex("model.weight", offset)] = place


def transformed(told):
    told.state_dict_metadata["model.weight"].size = torch.Size([1 << 50, 4])
    for number, chunk in enumerate(chunks(told)):
        chunk.sizes = torch.Size([1 << 49, 4])
        chunk.offsets = torch.Size([number << 49, 0])
        index = metadata.MetadataIndex("model.weight", chunk.offsets)
        told.storage_data[index] = filesystem._StorageInfo("__0_0.distcp", 0, 1, ["zstd"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda told: setattr(chunks(told)[1], "offsets", torch.Size((0, 0))), "of its 256 elements 128 are"),
        (lambda told: moved(told, (16, 0), (32, 4)), "overlap, and leave a hole"),
        (lambda told: moved(told, (32, 0), (16, 4)), "of its 256 elements 192 are"),
        (lambda told: moved(told, (0, 2), (64, 2)), "overlap, and leave a hole"),
        (one_place, "lie in one place"),
        (many_pieces_of_one_place, "lie in one place"),
        (transformed, "is transformed"),
        (lambda told: told.planner_data.update({"model.weight": ()}), "is no path"),
        (lambda told: setattr(told.state_dict_metadata["model.weight"], "size", (1 << 70, 4)), "has the shape"),
        (lambda told: setattr(told.state_dict_metadata["model.weight"], "size", (1 << 40, 1 << 40)), "has the shape"),
        (lambda told: setattr(told.state_dict_metadata["model.weight"], "size", (1,) * 65), "has the shape"),
    ],
)
def test_pieces_that_lie(saved, change, match):
    refused(saved, change, match)


def test_pieces_that_are_told_twice_are_one(saved):
    path = saved / ".metadata"
    told = pickle.loads(path.read_bytes())
    chunks(told).append(chunks(told)[0])
    path.write_bytes(pickle.dumps(told))
    model = nn.Linear(4, 64)
    sharded_io.load_model(model, saved.parent)
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(4, 64).weight)


def deep(opcode):
    """A dictionary with tuples in tuples as its key: C hashes them, one call in another."""
    return b"\x80\x02}" + b")" + opcode * 200_000 + b"K\x01s."


@pytest.mark.parametrize(
    "data",
    [
        deep(b"\x85"),
        b"\x80\x02})" + b"\x8c\x00\x86" * 100_000 + b"K\x01s.",
        b"\x80\x02}" + b"(" * 100_000 + b"t" * 100_000 + b"K\x01s.",
        b"\x80\x02}" + b"ctorch\nSize\n" * 20_000 + b")" + b"\x85\x85R" * 20_000 + b"K\x01s.",
    ],
)
def test_what_is_too_deep_to_be_hashed(saved, data):
    refused(saved, lambda told: data, "not the metadata of a checkpoint")


def test_what_is_too_deep_to_be_told(saved):
    def change(told):
        path = "]" * 50_000 + "a" * 49_999  # lists in lists
        record = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}"
        return b"\x80\x02" + record + b"X\x13\x00\x00\x00state_dict_metadata" + path.encode() + b"sb."

    refused(saved, change, "damaged|not the metadata")


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
