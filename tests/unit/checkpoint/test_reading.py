"""Tensors of a checkpoint: read once, into the memory where they stay, and never run."""

import copy
import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.checkpoint import checksum, files, memory, reading
from accelerate.checkpoint.contents import Contents
from accelerate.checkpoint.reading import Pending, Reading, Unusual

BIG = 200  # numbers a side: more than what is read at once


def big(dtype=torch.float32):
    return (torch.arange(BIG * BIG) % 251).reshape(BIG, BIG).to(dtype)


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
            and torch.equal(left, right)
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    return left == right


def opened(path, in_full, monkeypatch):
    monkeypatch.setattr(reading, "SPARE", 1 << 30 if in_full else 0)
    made = Reading(str(path.parent), {path.name: False})
    assert (path.name in made.in_full) is in_full
    return made


KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
STATES = {
    "of an optimizer": {
        "state": {
            0: {"step": torch.tensor(3.0), "exp_avg": big(), "exp_avg_sq": big() + 1},
            1: {"step": torch.tensor(3.0), "exp_avg": torch.ones(5), "momentum_buffer": None},
        },
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "name": "a", "foreach": None}],
    },
    "all dtypes": {str(kind): big(kind) for kind in KINDS},
    "complex": {"a": torch.complex(big(), big())},
    "odd shapes": [torch.zeros(0), torch.zeros(3, 0, 2), torch.tensor(7), torch.zeros(()), big().t(), big()[::2, 3:]],
    "channels last": {"a": torch.rand(8, 16, 20, 20).to(memory_format=torch.channels_last)},
    "ordered": OrderedDict(b=big(), a=[big(), (1, "two", 3.0, None, True)]),
    "expanded": {"a": torch.ones(1, 3).expand(30_000, 3)},
    "no tensors": {"last_epoch": 3, "values": [0.1]},
}


@pytest.mark.parametrize("in_full", [True, False])
@pytest.mark.parametrize("name", STATES)
def test_what_torch_wrote(tmp_path, monkeypatch, name, in_full):
    path = tmp_path / "f.bin"
    torch.save(STATES[name], path)
    found = opened(path, in_full, monkeypatch).content("f.bin")
    assert not (in_full and reading.is_pending(found))
    assert equal(reading.read_in_full(found), torch.load(path, weights_only=True))


@pytest.mark.parametrize("in_full", [True, False])
def test_what_safetensors_wrote(tmp_path, monkeypatch, in_full):
    tensors = {str(kind): big(kind) for kind in KINDS} | {"empty": torch.zeros(0, 3), "one": torch.tensor(1.0)}
    path = tmp_path / "f.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = opened(path, in_full, monkeypatch).content("f.safetensors")
    assert reading.is_pending(found) is not in_full
    assert equal(reading.read_in_full(found), tensors)


def test_shared_memory_stays_shared(tmp_path, monkeypatch):
    tensor = big()
    for in_full in (True, False):
        torch.save({"whole": tensor, "again": tensor, "row": tensor[3]}, tmp_path / "f.bin")
        found = reading.read_in_full(opened(tmp_path / "f.bin", in_full, monkeypatch).content("f.bin"))
        found["whole"][3] = -1
        assert bool((found["row"] == -1).all()) and torch.equal(found["again"], found["whole"])


def test_parameters(tmp_path, monkeypatch):
    torch.save({"a": nn.Parameter(big()), "b": nn.Parameter(torch.ones(2), requires_grad=False)}, tmp_path / "f.bin")
    for in_full in (True, False):
        found = reading.read_in_full(opened(tmp_path / "f.bin", in_full, monkeypatch).content("f.bin"))
        assert equal(found["b"].data, torch.ones(2)) and isinstance(found["b"], nn.Parameter)
        assert torch.equal(found["a"], big()) and not found["b"].requires_grad


class Runs:
    def __reduce__(self):
        return os.mkdir, (f"{os.environ['TMPDIR_OF_TEST']}/ran",)


@pytest.mark.parametrize(
    "obj",
    [
        {"a": np.zeros(2)},
        {"a": {1, 2}},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.float32},
        {"a": torch.nn.Linear(1, 1)},
        {"a": Runs()},
    ],
    ids=lambda obj: type(obj["a"]).__name__,
)
def test_other_objects_are_left_to_torch(tmp_path, monkeypatch, obj):
    monkeypatch.setenv("TMPDIR_OF_TEST", str(tmp_path))
    torch.save(obj, tmp_path / "f.bin")
    with pytest.raises(Unusual):
        opened(tmp_path / "f.bin", True, monkeypatch).content("f.bin")
    assert not (tmp_path / "ran").exists()


def test_other_formats_are_left_to_torch(tmp_path, monkeypatch):
    torch.save({"a": big()}, tmp_path / "f.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(Unusual):
        opened(tmp_path / "f.bin", True, monkeypatch).content("f.bin")
    (tmp_path / "f.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(Unusual):
        opened(tmp_path / "f.safetensors", False, monkeypatch).content("f.safetensors")
    with pytest.raises(Unusual, match="not announced"):
        Reading(str(tmp_path)).content("f.bin")


def rebuild(*arguments):
    return arguments


@pytest.mark.parametrize(
    "parts",
    [
        (("storage", "Float", "0", "cpu", 1 << 40), 0, (1,), (1,)),
        (("storage", "Float", "9", "cpu", 40_000), 0, (1,), (1,)),
        (("storage", "Float", "0", "cpu", 40_000), 39_999, (2,), (1,)),
        (("storage", "Float", "0", "cpu", 40_000), -1, (2,), (1,)),
        (("storage", "Float", "0", "cpu", 40_000), 0, (2, 2), (1,)),
        (("storage", "Float", "0", "cpu", 40_000), 0, (2,), (-1,)),
        (("storage", "Float", "0", "cpu", 40_000), 0, (1 << 62,), (1 << 62,)),
        (("storage", "Double", "0", "cpu", 40_000), 0, (2,), (1,)),
        (("other", "Float", "0", "cpu", 40_000), 0, (2,), (1,)),
        (("storage", "Float", "../0", "cpu", 40_000), 0, (2,), (1,)),
        ("storage", 0, (2,), (1,)),
    ],
    ids=str,
)
def test_descriptions_that_cannot_be(parts):
    """What a hostile file might say of a tensor."""
    kinds = {kind: reading._STORAGES[kind] for kind in ("Float", "Double")}
    records = {"0": (0, 160_000)}
    with pytest.raises((Unusual, ValueError, TypeError)):
        structure = reading._Structure(b"")
        told = parts[0]
        if isinstance(told, tuple):
            told = structure.persistent_load((told[0], kinds[told[1]], *told[2:]))
        made = reading._Rebuild()(told, *parts[1:], False, OrderedDict())
        reading._tensors(made, records, reading._Source(__file__, memory.fresh(160_000)))


def test_nothing_that_a_file_can_name_runs_or_changes(tmp_path):
    """Only containers and descriptions of tensors can be named, and those take no assignment."""
    for name in ("os system", "builtins eval", "torch load", "torch.serialization load", "collections Counter"):
        module, attribute = name.split()
        with pytest.raises(Unusual):
            reading._Structure(f"c{module}\n{attribute}\n.".encode()).load()
    assigning = b"ctorch._utils\n_rebuild_tensor_v2\n(N}(S'__defaults__'\n(tdtb."
    with pytest.raises((AttributeError, pickle.UnpicklingError)):
        reading._Structure(assigning).load()


def test_the_checksum_is_that_of_the_file_and_what_it_reads_is_kept(tmp_path, monkeypatch):
    save_file({"a": big()}, tmp_path / "f.safetensors")
    told = checksum.of_file(tmp_path / "f.safetensors")[1]
    for in_full in (True, False):
        opening = opened(tmp_path / "f.safetensors", in_full, monkeypatch)
        assert opening.checksum("f.safetensors") == told
        with monkeypatch.context() as patch:
            patch.setattr(reading._Source, "read", None)
            opening.content("f.safetensors")


@pytest.mark.parametrize(
    "stays, sizes, in_full",
    [
        ({"a": False, "b": False}, (500, 500), {"a", "b"}),
        ({"a": False, "b": False}, (500, 501), set()),
        ({"a": False, "b": True}, (500, 5000), {"a", "b"}),
        ({"a": False, "b": True}, (1001, 5000), {"b"}),
    ],
)
def test_what_is_read_in_full(tmp_path, monkeypatch, stays, sizes, in_full):
    monkeypatch.setattr(reading, "SPARE", 1000)
    for name, size in zip("ab", sizes, strict=True):
        (tmp_path / name).write_bytes(bytes(size))
    assert Reading(str(tmp_path), {**stays, "missing": False}).in_full == in_full


def test_the_processes_of_a_node_share_its_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    for processes, expected in (("1", 4), ("8", 2), ("16", 1), ("64", 1), ("", 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert reading.threads() == expected


# -- tensors that are still in the file ----------------------------------------------------------------------------


@pytest.fixture
def pending(tmp_path, monkeypatch):
    save_file({"a": big()}, tmp_path / "f.safetensors")
    return opened(tmp_path / "f.safetensors", False, monkeypatch).content("f.safetensors")["a"]


def test_it_tells_what_it_will_be_without_being_read(pending, monkeypatch):
    monkeypatch.setattr(reading._Source, "read", None)
    assert (pending.shape, pending.dtype, pending.device.type) == ((BIG, BIG), torch.float32, "cpu")
    assert (pending.numel(), pending.dim(), pending.element_size()) == (BIG * BIG, 2, 4)
    assert pending.is_floating_point() and not pending.is_meta and not pending.requires_grad
    moved = pending.to(dtype=torch.bfloat16, device="cpu")
    assert isinstance(moved, Pending) and moved.dtype is torch.bfloat16


@pytest.mark.parametrize("piece", [1000, 1 << 20])
@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(BIG, BIG),
        nn.Parameter(torch.zeros(BIG, BIG)),
        torch.zeros(BIG, BIG, dtype=torch.float64),
        torch.zeros(BIG, BIG, dtype=torch.bfloat16),
        torch.zeros(BIG, BIG).t(),
        torch.zeros(BIG, 2 * BIG)[:, ::2],
        torch.zeros(2 * BIG, BIG)[BIG:],
        torch.zeros(2, BIG, BIG),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}",
)
def test_copying_it_reads_it(pending, monkeypatch, target, piece):
    monkeypatch.setattr(reading, "_PIECE", piece)
    with torch.no_grad():
        assert target.copy_(pending) is target
    assert torch.equal(target, big().to(target.dtype).expand_as(target))


def test_whatever_else_is_done_with_it_reads_it(pending):
    assert torch.equal(pending + 1, big() + 1) and torch.equal(torch.stack([pending, pending])[1], big())
    assert type(pending.detach()) is type(pending.clone()) is type(copy.deepcopy(pending)) is torch.Tensor
    assert torch.equal(pending[3], big()[3]) and pending.sum() == big().sum()
    assert torch.equal(pending.to(torch.int32), big(torch.int32)) and torch.equal(pending.cpu(), big())
    assert torch.equal(torch.zeros(BIG, BIG).add_(pending), big())
    assert "Pending" not in repr(pending)
    assert equal(pending.to(dtype=torch.float64).read(), big(torch.float64))


def test_it_cannot_be_changed(pending):
    with pytest.raises(RuntimeError, match="still in"):
        pending.zero_()


def test_it_outlives_its_file(pending, tmp_path):
    (tmp_path / "f.safetensors").unlink()
    assert torch.equal(pending.read(), big())


def test_a_file_that_became_shorter(pending, tmp_path):
    os.truncate(tmp_path / "f.safetensors", 1000)
    with pytest.raises(OSError, match=r"f\.safetensors.*became shorter"):
        pending.read()


def test_what_can_take_it(pending):
    assert pending.fits(torch.empty(BIG, BIG))
    for other in (None, 3, torch.empty(BIG, BIG, dtype=torch.float64), torch.empty(BIG), torch.empty(BIG, BIG).t()):
        assert not pending.fits(other)


# -- restoring -----------------------------------------------------------------------------------------------------


def run(width=BIG, kind=torch.optim.AdamW, value=0.0):
    """A model, and an optimizer that has been stepped."""
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value + 1)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A checkpoint that is too large to be held beside the state."""
    monkeypatch.setattr(reading, "SPARE", 0)
    model, optimizer = run(value=5.0)
    files.write_model(model.state_dict(), tmp_path)
    files.write_optimizer(optimizer.state_dict(), tmp_path)
    return tmp_path, model, optimizer


def contents_of(folder, model, optimizer, **wanted):
    there = Reading(str(folder), {"model.safetensors": False, "optimizer.bin": False, **wanted})
    state = files.read_model(model, there)
    return Contents(str(folder), [(model, state)], [(optimizer, files.read_optimizer(there))], process_index=0)


def tensors(model, optimizer):
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return [*model.state_dict().values(), *moments]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adamax])
def test_a_large_state_is_read_into_the_memory_that_is_there(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(reading, "SPARE", 0)
    source = run(kind=kind, value=5.0)
    files.write_model(source[0].state_dict(), tmp_path)
    files.write_optimizer(source[1].state_dict(), tmp_path)
    model, optimizer = run(kind=kind)
    before = {tensor.data_ptr() for tensor in tensors(model, optimizer) if tensor.numel() == BIG * BIG}
    contents_of(tmp_path, model, optimizer).apply()
    assert all(map(equal, tensors(model, optimizer), tensors(*source)))
    assert {tensor.data_ptr() for tensor in tensors(model, optimizer) if tensor.numel() == BIG * BIG} == before
    assert all(type(tensor) is torch.Tensor for tensor in tensors(model, optimizer))


def test_nothing_changes_before_everything_else_is_done(saved):
    folder, *source = saved
    model, optimizer = run()
    held = tensors(model, optimizer)
    before = [tensor.clone() for tensor in held]
    restoring = contents_of(folder, model, optimizer).begin()
    assert all(map(torch.equal, held, before))
    restoring.undo()
    assert [id(tensor) for tensor in tensors(model, optimizer)[-6:]] == [id(tensor) for tensor in held[-6:]]
    assert all(map(torch.equal, tensors(model, optimizer), before))
    contents_of(folder, model, optimizer).apply()
    assert all(map(equal, tensors(model, optimizer), tensors(*source)))


def test_an_optimizer_that_has_not_been_stepped_takes_over_what_was_read(saved):
    folder, *source = saved
    model, _ = run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    contents_of(folder, model, optimizer, **{"optimizer.bin": True}).apply()
    assert all(map(equal, tensors(model, optimizer), tensors(*source)))


def test_another_dtype(saved):
    folder, model, _ = saved
    half = copy.deepcopy(model).half()
    optimizer = torch.optim.AdamW(half.parameters(), lr=0.1)
    contents_of(folder, half, optimizer).apply()
    assert all(state["exp_avg"].dtype is torch.float16 for state in optimizer.state.values())
    assert torch.equal(half[0].weight, model[0].weight.half())


def test_whoever_looks_at_the_values_gets_them(saved):
    folder, model, optimizer = saved
    seen = []
    other, watched = run()
    watched.register_load_state_dict_pre_hook(lambda _, state: seen.append(type(state["state"][0]["exp_avg"])))
    contents_of(folder, other, watched).apply()
    assert seen == [torch.Tensor] and all(map(equal, tensors(other, watched), tensors(model, optimizer)))

    class Own(torch.optim.AdamW):
        def load_state_dict(self, state):
            seen.append(type(state["state"][0]["exp_avg"]))
            super().load_state_dict(state)

    other, own = run(kind=Own)
    contents_of(folder, other, own).apply()
    assert seen == [torch.Tensor] * 2 and all(map(equal, tensors(other, own), tensors(model, optimizer)))


def test_tensors_that_are_assigned(saved):
    folder, model, _ = saved
    other, optimizer = run()
    contents_of(folder, other, optimizer).apply(assign=True)
    assert torch.equal(other[0].weight, model[0].weight) and type(other[0].weight) is nn.Parameter


def test_a_disk_that_fails_too_late_says_what_was_changed(saved, monkeypatch):
    folder, *_ = saved
    model, optimizer = run()
    restoring = contents_of(folder, model, optimizer).begin()
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(RuntimeError, match=r"model\.safetensors' became shorter(.|\n)*has been replaced already"):
        restoring.complete()


def test_weights_that_do_not_fit_are_refused_unread(saved, monkeypatch):
    folder, *_ = saved
    monkeypatch.setattr(reading._Source, "read", None)
    monkeypatch.setattr(reading, "SMALL", 0)
    there = Reading(str(folder), {"model.safetensors": False})
    with pytest.raises(RuntimeError, match="other shapes"):
        files.read_model(run(width=3)[0], there)


@pytest.mark.parametrize("seconds", [0, 1])
def test_memory(monkeypatch, seconds):
    """Whether its pages come quickly or slowly."""
    clock = iter(range(0, 1000 * max(seconds, 1), max(seconds, 1)))
    monkeypatch.setattr(memory.time, "thread_time", lambda: next(clock) * seconds)
    for size in (0, 1, 1000, 4 << 20, (12 << 20) + 1):
        made = memory.fresh(size)
        assert (made.dtype, made.shape) == (torch.uint8, (size,))
        assert not made.fill_(3).ne(3).any()
