"""Files of sharded models in one process: layouts, what does not fit, and what is damaged or hostile."""

import os
import pickle
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata

import sharded_io
from accelerate import Accelerator
from accelerate.checkpoint import dcp, model_io
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.utils import fsdp_utils
from cases import cases
from sharded_io import same
from unit.checkpoint.tied_net import Net, job

FIXTURES = Path(__file__).parents[2] / "fixtures" / "sharded"


def state_of(model, optimizer):
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": pickle.loads(pickle.dumps(optimizer.state_dict())),
    }


def save(model, optimizer, folder, layout="sharded"):
    sharded_io.save_model(model, folder, layout=layout)
    sharded_io.save_optimizer(optimizer, model, folder, layout=layout)


def load(model, optimizer, folder):
    sharded_io.load_model(model, folder)
    sharded_io.load_optimizer(optimizer, model, folder)


@pytest.mark.parametrize("saved", sorted(FIXTURES.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_upstream_wrote_on_two_ranks_is_read(saved):
    def trained(seed, steps):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        for _ in range(steps):
            model(torch.ones(1, 3)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(0, 2)
    other, its_optimizer = trained(1, 0)
    load(other, its_optimizer, saved)
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()))
    mine, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    torch.testing.assert_close(theirs["state"], mine["state"])
    assert theirs["param_groups"] == mine["param_groups"]


def test_the_layout_that_was_asked_for_is_taken(tmp_path):
    saved, found = {"sharded": Net(), "full": Net()}, Net()
    for layout, model in saved.items():
        sharded_io.save_model(model, tmp_path, layout=layout)
    for layout, model in saved.items():
        sharded_io.load_model(found, tmp_path, prefer=layout)
        assert same(dict(found.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("file", ["pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank0.bin"])
def test_files_of_single_ranks_are_refused(tmp_path, file):
    """As upstream writes them with LOCAL_STATE_DICT, or use_dcp=False."""
    (tmp_path / file).touch()
    fails(tmp_path, *job(), ValueError, f"{file}.*what each rank had.*on as many ranks.*SHARDED_STATE_DICT")


def fails(folder, model, optimizer, kind, match, what="model"):
    before = state_of(model, optimizer)
    with pytest.raises(kind, match=match):
        if what == "model":
            sharded_io.load_model(model, folder)
        else:
            sharded_io.load_optimizer(optimizer, model, folder)
    assert same(before, state_of(model, optimizer))


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_another_model(tmp_path, layout):
    save(*job(), tmp_path, layout)
    wide = job(width=5)
    fails(tmp_path, *wide, RuntimeError, "embedding.weight|elements")
    fails(tmp_path, *wide, RuntimeError, "shape|elements", "optimizer")
    other = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(other.parameters())
    fails(tmp_path, other, optimizer, RuntimeError, "0.weight")
    fails(tmp_path, other, optimizer, RuntimeError, "0.weight|no state for", "optimizer")


def test_names_may_differ_if_that_is_asked_for(tmp_path):
    sharded_io.save_model(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    keys = sharded_io.load_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tmp_path, strict=False)
    assert keys.missing_keys == ["1.weight", "1.bias"]


def test_other_groups(tmp_path):
    model, optimizer = job()
    sharded_io.save_optimizer(optimizer, model, tmp_path)
    one = torch.optim.AdamW(model.parameters())
    fails(tmp_path, model, one, RuntimeError, "in groups", "optimizer")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    (tmp_path / "optimizer_0" / ".metadata").unlink()
    fails(tmp_path, model, one, RuntimeError, "groups of", "optimizer")


def test_parameters_of_another_model(tmp_path):
    model, optimizer = job()
    with pytest.raises(ValueError, match="Parameter 0 of the optimizer's group 0"):
        sharded_io.save_optimizer(optimizer, Net(), tmp_path)
    expected = [["layer.bias", "scale"], ["layer.weight", "embedding.weight"]]
    assert model_io.owner(optimizer, [nn.Linear(1, 1), torch.compile(model)])[1] == expected
    assert model_io.owner(optimizer, [nn.Linear(1, 1)]) == (None, [])


def test_nothing_there(tmp_path):
    model, optimizer = job()
    fails(tmp_path, model, optimizer, FileNotFoundError, "pytorch_model_fsdp_0")
    fails(tmp_path, model, optimizer, FileNotFoundError, "optimizer_0", "optimizer")


class Bomb:
    """Runs code when it is unpickled; its file must not run it."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "checkpoint"
    save(*job(), folder)
    return folder


def rewritten(folder, change):
    path = folder / ".metadata"
    told = pickle.loads(path.read_bytes())
    change(told)
    path.write_bytes(pickle.dumps(told))


TRAP = Bomb("trap")


@cases(
    "data, match",
    *(
        (pickle.dumps(bomb), "could not be read.*mkdir")
        for bomb in (TRAP, {"state_dict_metadata": TRAP}, metadata.Metadata({"a": TRAP}, None, TRAP))
    ),
    (b"", ""),
    (b"garbage", ""),
    (pickle.dumps([1, 2, 3]), ""),
    (pickle.dumps(metadata.Metadata({})), ""),
    (b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'x'\nI1\nstb.", ""),  # sets attributes of the class
    (b"cbuiltins\neval\n(S'1/0'\ntR.", ""),
    (b"ctorch\nload\n.", ""),
    (b"cos\nsystem\n(S'true'\ntR.", ""),
)
def test_metadata_that_is_none_or_runs_code(saved, monkeypatch, data, match):
    monkeypatch.chdir(saved)
    (saved / "pytorch_model_fsdp_0" / ".metadata").write_bytes(data)
    fails(saved, *job(), DamagedCheckpoint, f"metadata {match}".strip())
    assert not hasattr(metadata.Metadata, "x") and not (saved / "trap").exists()


@pytest.fixture
def two_ranks(tmp_path):
    """What two ranks wrote: a weight of two rows, each a piece."""
    return shutil.copytree(FIXTURES / "1.15.0" / "fsdp2-sharded", tmp_path / "two_ranks")


def storage(told):
    return next(info for index, info in told.storage_data.items() if index.fqn == "model.weight")


def weight(told):
    return told.state_dict_metadata["model.weight"]


def swapped(told):
    where = {index.fqn: index for index in told.storage_data}
    a, b = where["model.weight"], where["model.bias"]
    told.storage_data[a], told.storage_data[b] = told.storage_data[b], told.storage_data[a]


def smaller(told):
    """Let the second piece be smaller, and the files say the same."""
    weight(told).chunks[1] = metadata.ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((1, 2)))


@cases(
    "change, match",
    (lambda told: setattr(storage(told), "relative_path", "../../etc/passwd"), "leads out"),
    (lambda told: setattr(storage(told), "relative_path", "/etc/passwd"), "leads out"),
    (lambda told: setattr(storage(told), "relative_path", "__5_0.distcp"), "__5_0.distcp is missing"),
    (lambda told: setattr(storage(told), "length", 1 << 40), "bytes, but"),
    (lambda told: setattr(storage(told), "offset", -1), "could not be read"),
    (lambda told: setattr(storage(told), "length", 8), "could not be read"),
    (lambda told: told.storage_data.clear(), "could not be read"),
    (swapped, "could not be read"),
    (lambda told: setattr(told, "planner_data", {"model.weight": 1.5}), "could not be read"),
    (lambda told: told.planner_data.update({"model.weight": ()}), "could not be read"),
    (lambda told: setattr(weight(told), "chunks", []), "of its 6 elements 0 are in the files"),
    (lambda told: setattr(weight(told).chunks[1], "offsets", torch.Size((0, 0))), "of its 6 elements 3 are"),
    (smaller, "of its 6 elements 5 are"),
    (lambda told: weight(told).chunks[0].__dict__.update(sizes=(2, 0)), "is not whole"),
    (
        lambda told: weight(told).chunks[0].__dict__.update(sizes=(3, 1)),
        r"piece of shape \(3, 1\) at \(0, 0\), outside",
    ),
    (
        lambda told: weight(told).chunks[1].__dict__.update(offsets=(-1, 0)),
        r"piece of shape \(1, 3\) at \(-1, 0\), outside",
    ),
    (lambda told: weight(told).chunks[1].__dict__.update(offsets=(0,)), "could not be read"),
    (lambda told: setattr(weight(told), "size", (1 << 70, 4)), "is not whole"),
    (lambda told: setattr(weight(told), "properties", None), "could not be read"),
    (lambda told: setattr(weight(told).properties, "dtype", "F32"), "has the dtype 'F32'"),
)
def test_metadata_that_lies(two_ranks, change, match):
    rewritten(two_ranks / "pytorch_model_fsdp_0", change)
    model = nn.Linear(3, 2)
    fails(two_ranks, model, torch.optim.AdamW(model.parameters()), DamagedCheckpoint, match)


def in_pieces(folder, pieces, shape=(4, 3)):
    """Write one weight, whose metadata says that these pieces, offsets and shapes, are what it is made of."""
    parts = {f"part{number}": torch.full(size, float(number)) for number, (_, size) in enumerate(pieces)}
    torch_dcp.save({"model": parts}, checkpoint_id=folder, no_dist=True)

    def change(told):
        specs, places = told.state_dict_metadata, told.storage_data
        found = {index.fqn: place for index, place in places.items()}
        properties = specs["model.part0"].properties
        chunks = [metadata.ChunkStorageMetadata(*map(torch.Size, piece)) for piece in pieces]
        told.state_dict_metadata = {
            "model.weight": metadata.TensorStorageMetadata(properties, torch.Size(shape), chunks)
        }
        told.planner_data = {"model.weight": ("model", "weight")}
        told.storage_data = {
            metadata.MetadataIndex("model.weight", chunk.offsets): found[f"model.part{number}"]
            for number, chunk in enumerate(chunks)
        }

    rewritten(folder, change)
    return folder.parent


SHIFTED = (
    ([((0, 0), (2, 3)), ((1, 0), (2, 3))], r"weight of shape \(4, 3\) has pieces that overlap"),
    ([((0, 0), (2, 3)), ((-2, 0), (2, 3))], r"piece of shape \(2, 3\) at \(-2, 0\), outside"),
    ([((0, 0), (2, 3)), ((3, 0), (2, 3))], r"piece of shape \(2, 3\) at \(3, 0\), outside"),
    ([((0, 0), (4, 2)), ((0, 1), (2, 1)), ((2, 2), (2, 1))], "pieces that overlap"),
    ([((0, 0), (3, 2)), ((2, 1), (2, 2)), ((0, 2), (2, 1))], "pieces that overlap"),
)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("reader", ["load_state", "sharded_io", "export", "reshard", "merge"])
@cases("pieces, match", *SHIFTED)
def test_shards_that_are_shifted_are_refused(tmp_path, pieces, match, reader):
    folder = in_pieces(tmp_path / "c" / "pytorch_model_fsdp_0", pieces)
    model = nn.Linear(3, 4, bias=False)
    before = model.weight.detach().clone()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    if reader in ("export", "reshard", "merge"):
        convert = pytest.importorskip("accelerate.extensions.convert.convert")
    readers = {
        "load_state": lambda: accelerator.load_state(folder),
        "sharded_io": lambda: sharded_io.load_model(model, folder),
        "export": lambda: convert.export(folder, tmp_path / "out"),
        "reshard": lambda: convert.reshard(folder, tmp_path / "out", "full"),
        "merge": lambda: fsdp_utils.merge_fsdp_weights(folder / "pytorch_model_fsdp_0", tmp_path / "out"),
    }
    with pytest.raises(DamagedCheckpoint, match=match):
        readers[reader]()
    assert torch.equal(model.weight, before) and not list(tmp_path.glob("out/*"))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@cases(
    "pieces",
    [((0, 0), (1, 3)), ((1, 0), (3, 3))],
    [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 2), (2, 1)), ((2, 2), (2, 1))],
    [((0, 0), (1, 2)), ((0, 2), (3, 1)), ((3, 1), (1, 2)), ((1, 0), (3, 1)), ((1, 1), (2, 1))],  # around one
    [((0, 0), (4, 3)), ((2, 0), (0, 3)), ((0, 3), (4, 0))],  # ranks that have nothing
)
def test_shards_of_any_cut_are_read(tmp_path, pieces):
    folder = in_pieces(tmp_path / "c" / "pytorch_model_fsdp_0", pieces)
    found = dcp.ShardedFolder(folder / "pytorch_model_fsdp_0")
    expected = torch.full((4, 3), -1.0)
    for number, ((row, column), (rows, columns)) in enumerate(pieces):
        expected[row : row + rows, column : column + columns] = number
    assert torch.equal(found.read(found.state)["model"]["weight"], expected)


def test_many_pieces_are_compared_quickly(tmp_path):
    """20,000 of them: each with each other would take minutes."""
    (tmp_path / "one").touch()
    rows = [metadata.ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, 2))) for row in range(20_000)]
    places = {metadata.MetadataIndex("w", rows[0].offsets): filesystem._StorageInfo("one", 0, 0)}
    spec = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), torch.Size((20_000, 2)), rows)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({"w": spec}, {}, places)))
    assert len(dcp.read_metadata(tmp_path).state_dict_metadata["w"].chunks) == 20_000


def test_values_run_no_code(tmp_path, saved):
    trap, folder = tmp_path / "trap", saved / "optimizer_0"

    def change(told):
        (index,) = [index for index in told.storage_data if index.fqn == "optimizer.param_groups.0.lr"]
        torch.save(Bomb(trap), folder / "bomb.distcp")
        size = (folder / "bomb.distcp").stat().st_size
        told.storage_data[index] = filesystem._StorageInfo("bomb.distcp", 0, size)

    rewritten(folder, change)
    fails(saved, *job(), DamagedCheckpoint, "could not be read", "optimizer")
    assert not trap.exists()


def test_random_damage_changes_nothing(saved):
    """Whatever is flipped, loading refuses it cleanly, or it was data that only a checksum can tell."""
    model, optimizer = job(seed=1)
    before = state_of(model, optimizer)
    draw, refused = random.Random(0), 0
    files = sorted(path for path in saved.rglob("*") if path.is_file())
    for path in draw.choices(files, k=100):
        data = bytearray(path.read_bytes())
        whole = bytes(data)
        for _ in range(draw.choice([1, 3, 20])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            if "optimizer" in path.parent.name:
                sharded_io.load_optimizer(optimizer, model, saved)
            else:
                sharded_io.load_model(model, saved)
        except (RuntimeError, FileNotFoundError):
            refused += 1
            assert same(before, state_of(model, optimizer))
        else:
            model, optimizer = job(seed=1)
        path.write_bytes(whole)
    assert refused > 30


def test_threads_that_read_at_a_time_get_their_own(tmp_path, monkeypatch):
    """Torch writes several files in as many threads."""
    both, read_data = threading.Barrier(2), torch_dcp.FileSystemReader.read_data
    expected = {name: torch.full((5,), value) for name, value in (("a", 1.0), ("b", 2.0))}
    dcp.save({"model": expected}, tmp_path)
    stored = dcp.ShardedFolder(tmp_path)

    def slow(reader, plan, planner):
        both.wait(10)
        return read_data(reader, plan, planner)

    monkeypatch.setattr(torch_dcp.FileSystemReader, "read_data", slow)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip("ab", pool.map(lambda name: stored.read(stored.state["model"][name]), "ab"), strict=True))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
