"""Files of single objects, and giving objects their state back: from the files' memory into theirs, all or nothing."""

import copy
import gc
import os
import pickle
import sys

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sharded_io
from accelerate import checkpointing
from accelerate.checkpoint import formats, layouts, optimizers
from accelerate.checkpoint import torch_files as other
from accelerate.checkpoint.apply import Contents
from accelerate.checkpoint.manifest import DamagedCheckpoint, FileEntry, Manifest
from accelerate.checkpoint.read import read_common, read_file
from accelerate.checkpoint.save import SavePlan, add_model, add_optimizer, plain_names
from accelerate.checkpoint.state import Common
from accelerate.checkpoint.stored import FullFiles, read_whole
from accelerate.checkpoint.verify import CheckpointFolder, with_manifest
from accelerate.data.loader import DataLoaderShard
from accelerate.process import PartialState
from accelerate.runtime import durable
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from cases import cases
from sharded_io import same


def common(schedulers=(), loaders=(), custom=()):
    return Common(schedulers, loaders, custom, None, 0, torch.device("cpu"))


def write_model(state, folder):
    add_model(state, plan := SavePlan(str(folder)))
    plan.write()


def write_optimizer(state, folder):
    add_optimizer(state, plan := SavePlan(str(folder)))
    plan.write()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers_are_understood(tmp_path, prefix):
    net = nn.Linear(2, 2)
    write_model({prefix + name: value for name, value in net.state_dict().items()}, tmp_path)
    wrapped = torch.compile(nn.DataParallel(nn.Linear(2, 2)), backend="eager")
    for model in (nn.Linear(2, 2), wrapped):
        layouts.read_full_model(model, tmp_path).apply()
        assert all(map(torch.equal, model.state_dict().values(), net.state_dict().values()))
    assert plain_names(wrapped.state_dict())._metadata == wrapped._orig_mod.state_dict()._metadata
    assert plain_names({"_orig_mod.a._orig_mod.b": 1, "module.c": 2}) == {"a.b": 1, "module.c": 2}


def test_a_misfit_lists_what_differs(tmp_path):
    write_model({"weight": torch.ones(2, 2), **{f"a{n}": torch.ones(1) for n in range(12)}}, tmp_path)
    shapes = r"weight has \(2, 2\) in the file and \(2, 3\) in the model"
    names = r"Linear.*bias is missing in the file\n  a0 is unexpected in the file\n.* and 3 more\n.*strict=False"
    both = rf"model\.safetensors.*{shapes}\n.*missing"
    for width, strict, told in [(2, True, names), (3, True, both), (3, False, shapes)]:
        with pytest.raises(RuntimeError, match=f"(?s){told}"):
            layouts.read_full_model(nn.Linear(width, 2), tmp_path, model_options={"strict": strict})
    net = nn.Linear(2, 2)
    layouts.read_full_model(net, tmp_path, model_options={"strict": False}).apply()
    assert net.weight.eq(1).all()


class Object:
    """A registered object, or a loader with a separate state that was not prepared."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_schedulers_of_torch_load_without_trust(tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        pass  # torch forgets them now, also where they were allowed before
    rules = {"MultiStepLR": [[1, 2]], "LambdaLR": [lambda _: 1.0], "ReduceLROnPlateau": []}
    rules["OneCycleLR"] = [numpy.float64(0.1), 10]
    for kind, arguments in rules.items():
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, *arguments)
        checkpointing.save_accelerator_state(tmp_path, [], [], [scheduler], [], 0, 0)
        checkpointing.load_accelerator_state(tmp_path, [], [], [scheduler], [], 0)


class Reduced:
    """Pickles to a call of `function`, and a state for what it returns."""

    def __init__(self, function, arguments, *state):
        self.reduced = (function, arguments, *state)

    def __reduce__(self):
        return self.reduced


def lie(kind, *, subarray=None, names=None, fields=None, size=-1, flags=0):
    return Reduced(numpy.dtype, (kind, False, True), (3, "<", subarray, names, fields, size, -1, flags))


def array(dtype, data, shape=(1,)):
    reconstruct, *_ = numpy.zeros(1).__reduce__()
    return Reduced(reconstruct, (numpy.ndarray, (0,), b"b"), (1, shape, dtype, False, data))


ADDRESS = b"AAAAAAAA"
OBJECTS = {"names": ("f",), "fields": {"f": (Reduced(numpy.dtype, ("O",)), 0)}}


@cases(
    "hostile",
    array(lie("f8", **OBJECTS), ADDRESS),
    array(lie("u4", **OBJECTS), ADDRESS[:4]),
    array(lie("u4", **OBJECTS, size=8), ADDRESS),
    array(lie("f8", subarray=(numpy.dtype("f8"), (1 << 40,))), ADDRESS),
    array(Reduced(numpy.dtype, ("O",)), ADDRESS),
    array(Reduced(numpy.dtype, ([("f", "f8")],)), ADDRESS),
    Reduced(numpy.float64(1).__reduce__()[0], (lie("f8", **OBJECTS), ADDRESS)),
    Reduced(numpy.ndarray, ((1,), "O", ADDRESS)),
    Reduced(numpy.ndarray, ((1,), [("f", "O")], ADDRESS)),
    Reduced(numpy.ndarray, ((4,), "f8", ADDRESS * 4, -64)),
)
def test_arrays_whose_dtype_leads_elsewhere_are_refused(tmp_path, hostile):
    """The address would be read when the array is."""
    torch.save({"value": hostile}, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(pickle.UnpicklingError, match=r"custom_checkpoint_0.pkl could not be read"):
        read_file(tmp_path, "custom_checkpoint_0.pkl")


def test_arrays_and_numbers_of_numpy_are_read_as_they_were(tmp_path):
    kinds = ("?", "i1", "<u2", ">i4", "u8", "f2", ">f4", "f8", "c16", "U5", "S3")
    arrays = {kind: numpy.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    arrays |= {"ordered": numpy.asfortranarray(arrays["f8"]), "one": numpy.array(2.5)}
    shared = numpy.arange(4)
    state = {
        "arrays": arrays,
        "nested": [({"twice": shared}, 1), shared],
        "numbers": [numpy.float64(0.5), numpy.float32(0.5), numpy.int64(3), numpy.bool_(True)],
        "random": numpy.random.RandomState(3).get_state(),
        "tensor": torch.ones(2),
    }
    state["itself"] = state["nested"]
    state["nested"].append(state["nested"])
    torch.save(state, tmp_path / "state.bin")
    before = torch.serialization.get_safe_globals()
    by_others = [numpy.dtype, numpy.ndarray, type(numpy.dtype("f8"))]
    with torch.serialization.safe_globals(by_others):
        allowed = torch.serialization.get_safe_globals()
        found = other.load(tmp_path / "state.bin")
        assert set(torch.serialization.get_safe_globals()) == set(allowed)
    assert set(torch.serialization.get_safe_globals()) == set(before)
    for kind, expected in pickle.loads(pickle.dumps(arrays, 2)).items():  # which changes the order of bytes
        array = found["arrays"][kind]
        assert type(array) is numpy.ndarray and array.dtype == expected.dtype, kind
        assert array.shape == expected.shape and (array == expected).all() and array.flags.writeable, kind
    assert found["nested"][0][0]["twice"] is found["nested"][1] and found["itself"][2] is found["itself"]
    assert (found["nested"][1] == shared).all() and found["numbers"] == state["numbers"]
    assert [type(one) for one in found["numbers"]] == [type(one) for one in state["numbers"]]
    generator = numpy.random.RandomState()
    generator.set_state(found["random"])
    assert generator.rand() == numpy.random.RandomState(3).rand()


class Levels:
    """A class that only its owner lets a file build."""


class MoreLevels:
    """One that another thread allows."""


def test_a_load_and_what_other_threads_allow_meanwhile_leave_each_other_alone(tmp_path, monkeypatch):
    """What torch may build is the same for all threads: a load took the classes of another away, which failed."""
    torch.save(Levels(), tmp_path / "levels.bin")
    path = f"{Levels.__module__}.Levels"
    before = torch.serialization.get_safe_globals()
    load = torch.load

    def load_while_another_thread_begins(*args, **kwargs):
        torch.serialization.add_safe_globals([MoreLevels])
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load_while_another_thread_begins)
    try:
        assert type(other.load(tmp_path / "levels.bin", classes={path: Levels})) is Levels
        assert set(torch.serialization.get_safe_globals()) == {*before, MoreLevels}
        with pytest.raises(pickle.UnpicklingError, match="Levels"):
            other.load(tmp_path / "levels.bin")
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize("rows", [3, 1000])
def test_tensors_of_a_pickle_are_read_as_they_were(tmp_path, rows):
    """From their places in the file, or all at once if some of them are not contiguous plain tensors."""
    weight = torch.randn(rows, 1000)
    numbers = torch.complex(torch.arange(4.0), torch.arange(4.0, 8.0))
    plain = {"weight": weight, "tied": weight, "rest": [weight[1:], {"empty": torch.empty(0), "step": torch.ones(())}]}
    kinds = {"kinds": [weight.bfloat16(), nn.Parameter(weight[0]), weight > 0, numbers]}
    odd = {"turned": weight.T, "every other": weight[:, ::2], "conj": numbers.conj(), "inside": (weight, {2})}
    for number, state in enumerate([plain, plain | kinds, plain | kinds | odd]):
        path = str(tmp_path / f"{number}.bin")
        torch.save(state, path)
        reader = FullFiles(path)
        stored = reader.open(path)
        found = reader.read(stored)
        assert same(found, torch.load(path, weights_only=True)) and reader.aliases == {"tied": "weight"}
        part = torch.empty(2, 400)
        reader.plan([(stored["weight"], part)])
        assert torch.equal(reader.elements(stored["weight"], 1500, 1600), weight.flatten()[1500:1600])
    assert same(read_whole(path), found)


def test_what_is_missing_or_unreadable_is_named(tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match="safe_serialization=False"):
        write_model({"weight": torch.ones(1), "_extra_state": {"a": 1}}, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no model 1 \(Linear\): neither model_1.safetensors nor"):
        layouts.read_full_model(nn.Linear(1, 1), tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="no optimizer 2: neither optimizer_2 nor optimizer_2.bin"):
        optimizers.read_full_optimizer(optimizer, [], tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="scheduler 0: scheduler.bin"):
        read_common(Contents(with_manifest(tmp_path), common([optimizer])))
    torch.save(optimizer.state_dict(), tmp_path / "scheduler.bin")
    os.truncate(tmp_path / "scheduler.bin", 500)
    with pytest.raises(RuntimeError, match="scheduler.bin could not be read, so it is damaged"):
        read_common(Contents(with_manifest(tmp_path), common([optimizer])))
    torch.save([1], tmp_path / "random_states_0.pkl")
    with pytest.raises(RuntimeError, match="random_states_0.pkl is damaged: it holds a list"):
        read_common(Contents(with_manifest(tmp_path), common()))
    torch.save({"value": Object(1)}, tmp_path / "custom_checkpoint_1.pkl")
    with pytest.raises(pickle.UnpicklingError, match="(?s)custom_checkpoint_1.pkl.*weights_only.: False"):
        checkpointing.load_custom_state(Object(), tmp_path, 1)
    trusted = read_file(tmp_path, "custom_checkpoint_1.pkl", load_kwargs={"weights_only": False})
    assert trusted["value"].value == 1


def test_other_ranks_write_no_shared_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(PartialState, "is_main_process", False)
    checkpointing.save_accelerator_state(tmp_path, [nn.Linear(1, 1).state_dict()], [Object()], [Object()], [], 1, 0)
    checkpointing.save_custom_state(Object(1), tmp_path)
    plan = SavePlan(str(tmp_path), writes_shared=False)
    add_model({}, plan)
    add_optimizer({}, plan)
    assert not plan.contents()
    assert os.listdir(tmp_path) == ["random_states_1.pkl"]
    assert checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 0) == {}
    assert "rank 0 keeps its random states" in caplog.text


def run(kind=torch.optim.AdamW, value=0.0, width=100):
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value + 1)
    optimizer.step(), optimizer.zero_grad()
    return model, optimizer


def saved(folder, kind=torch.optim.AdamW):
    model, optimizer = run(kind, 5.0)
    write_model(model.state_dict(), folder)
    write_optimizer(optimizer.state_dict(), folder)
    return model, optimizer


def restore(folder, model, optimizer, **options):
    checkpointing.load_accelerator_state(folder, [model], [optimizer], [], [], 0, **options)


def tensors(model, optimizer):
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *moments]


def assert_own_memory(folder, *held):
    """Nothing is a file's any more: it stays as it is whatever becomes of the files."""
    before = [tensor.clone() for tensor in held]
    for path in folder.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert all(map(torch.equal, held, before))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adamax])
@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_a_model_keeps_its_memory_and_an_optimizer_gets_its_own(tmp_path, kind, layout):
    source, (model, optimizer) = saved(tmp_path, kind), run(kind)
    if layout == "sharded":
        sharded_io.save_model(source[0], tmp_path)
    held = [*model.state_dict().values()]
    restore(tmp_path, model, optimizer)
    assert all(map(torch.equal, tensors(model, optimizer), tensors(*source)))
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == [tensor.data_ptr() for tensor in held]
    for path in filter(os.path.isfile, tmp_path.iterdir()):
        path.write_bytes(bytes(path.stat().st_size))
    assert all(map(torch.equal, tensors(model, optimizer), tensors(*source)))


@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.half, {}), (torch.half, {"assign": True})])
def test_without_such_memory_a_state_gets_its_own(tmp_path, dtype, options):
    source, (model, _) = saved(tmp_path), run()
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    restore(tmp_path, model, optimizer, **options)
    got = tensors(model, optimizer)
    assert all(torch.equal(a.float(), b.to(a.dtype).float()) for a, b in zip(got, tensors(*source), strict=True))
    assert got[-1].dtype is dtype and type(model[0].weight) is nn.Parameter
    assert model[0].weight.dtype is (torch.float32 if options else dtype)
    assert_own_memory(tmp_path, *got)


def test_own_code_may_keep_what_it_gets(tmp_path):
    (net, trained), kept = saved(tmp_path), []
    weights = net.state_dict()
    weights["old name"] = weights.pop("0.weight")
    write_model(weights, tmp_path)

    class OwnModel(nn.Sequential):
        def _load_from_state_dict(self, state, *args):
            kept.append(state["old name"])
            state["0.weight"] = state.pop("old name")
            super()._load_from_state_dict(state, *args)

    class OwnOptimizer(torch.optim.AdamW):
        def load_state_dict(self, state):
            kept.append(state["state"][0]["exp_avg"])
            super().load_state_dict(state)

    model = OwnModel(*run()[0])
    own, hooked = OwnOptimizer(model.parameters()), torch.optim.AdamW(model.parameters())
    hooked.register_load_state_dict_pre_hook(lambda _, state: kept.append(state["state"][0]["exp_avg"]))
    restore(tmp_path, model, own)
    restore(tmp_path, model, hooked)
    checkpointing.save_custom_state(Object(torch.ones(99)), tmp_path)
    registered = Object()
    checkpointing.load_custom_state(registered, tmp_path)
    assert_own_memory(tmp_path, *tensors(model, own), *tensors(model, hooked), *kept, registered.value)
    moment = trained.state[net[0].weight]["exp_avg"]
    assert all(map(torch.equal, kept, [moment, net[0].weight] * 2))


def save(folder, loader, rank=0):
    checkpointing.save_accelerator_state(folder, [], [], [], [loader], rank, 0)


def restored(folder, loader, rank=0):
    checkpointing.load_accelerator_state(folder, [], [], [], [loader], rank)
    return loader


def numbers(loader):
    return [batch.item() for batch in loader]


def shard(length=6, **options):
    return DataLoaderShard(list(range(length)), batch_size=1, **options)


def test_each_rank_finds_its_own_state_and_a_new_one_the_shared_one(tmp_path, monkeypatch):
    for index in (0, 1):
        monkeypatch.setattr(PartialState, "is_main_process", index == 0)
        save(tmp_path, Object(index * 10), index)
    assert {"dl_state_dict.bin", "random_states_1.pkl"} < set(os.listdir(tmp_path))
    assert [restored(tmp_path, Object(), index).value for index in (0, 1, 2)] == [0, 10, 0]
    torch.save(Object(20).state_dict(), tmp_path / "rank2_dl_state_dict.bin")  # as former formats had it
    assert restored(tmp_path, Object(), 2).value == 20
    restored(tmp_path, DataLoader([1, 2])), restored(tmp_path, shard())  # of which the checkpoint says nothing


def test_a_stateful_loader_begins_anew_too_where_that_was_asked_for(tmp_path):
    pytest.importorskip("torchdata.stateful_dataloader")
    loader = shard(use_stateful_dataloader=True)
    reader = iter(loader)
    next(reader), next(reader)
    save(tmp_path, loader)
    assert numbers(restored(tmp_path, shard(use_stateful_dataloader=True))) == [2, 3, 4, 5]
    anew = shard(7, use_stateful_dataloader=True)  # other data, which only a loader that continues has to refuse
    with pytest.raises(ValueError, match="Data loader 0"):
        restored(tmp_path, anew)
    anew.continue_after_load = False
    assert numbers(restored(tmp_path, anew)) == list(range(7))


@pytest.mark.parametrize("safe", [True, False])
def test_given_objects_are_saved_and_loaded(tmp_path, safe):
    model, optimizer = run(value=5.0, width=2)
    parts = [[optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)], [DataLoader([1, 2], shuffle=True)]]
    saved = checkpointing.save_accelerator_state(
        str(tmp_path / "new"),
        *([model.state_dict()], *parts, 0, 5),
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
        safe_serialization=safe,
    )
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    files = {weights, "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"}
    assert saved == tmp_path / "new" and set(os.listdir(saved)) == files
    other, its_optimizer = run(width=2)
    schedulers, scaler = [torch.optim.lr_scheduler.StepLR(its_optimizer, 1)], torch.amp.GradScaler("cpu")
    given = [other], [its_optimizer], schedulers, [DataLoader([1, 2])], 0, scaler, "on_device"
    assert checkpointing.load_accelerator_state(saved, *given) == {"step": 5}
    assert all(map(torch.equal, tensors(other, its_optimizer), tensors(model, optimizer)))
    assert scaler.get_scale() == 4.0


def test_a_scaler_or_a_rank_that_was_not_there_is_told(tmp_path, caplog):
    checkpointing.save_accelerator_state(tmp_path, [], [], [], [], 0, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 3, scaler) == {"step": 5}
    assert scaler.get_scale() == 8.0 and "scaler.pt" in caplog.text
    drawn = torch.rand(2)
    assert checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 3) == {"step": 5}
    assert torch.equal(torch.rand(2), drawn), "its numbers are derived from what the checkpoint has"
    checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 4)
    assert not torch.equal(torch.rand(2), drawn)
    assert "random_states_3.pkl" in caplog.text and "fewer processes" in caplog.text


def listed(tmp_path, *names):
    entries = {name: formats.describe(tmp_path / name) for name in names}
    return Manifest(entries)


def test_what_is_read_is_compared_piece_by_piece_and_once(tmp_path):
    piece = durable.CHUNK
    with formats.durable(tmp_path / "shards") as file:
        file.write(bytes(2 * piece + 100))
    listing = Manifest({"shards": FileEntry.of(file)})
    with open(tmp_path / "shards", "r+b") as damaged:
        damaged.seek(2 * piece + 50)
        damaged.write(b"x")
    folder = CheckpointFolder(str(tmp_path), listing)
    folder.check({"shards": [(0, 10), (piece - 1, piece + 1)], "not listed": None})
    with pytest.raises(DamagedCheckpoint, match="shards has changed: the checksum of its piece 2 is"):
        folder.check({"shards": [(2 * piece - 1, 2 * piece + 1)]})
    assert len(folder.wrong) == 1
    os.remove(tmp_path / "shards")
    assert folder.differences({"shards": None}) == []  # each piece was hashed
    with pytest.raises(DamagedCheckpoint, match="shards could not be read"):
        CheckpointFolder(str(tmp_path), listing).check(["shards"])


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(5, "disk"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_is_not_damage(tmp_path, monkeypatch, error):
    torch.save({"weight": torch.ones(2)}, tmp_path / "state.bin")

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error)) as raised:
        read_whole(str(tmp_path / "state.bin"))
    assert raised.value is error


def open_files(path):
    return sum(os.path.realpath(f"/proc/self/fd/{number}") == path for number in os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["state.bin", "state.safetensors"])
def test_a_named_pipe_is_refused_before_anything_opens_it(tmp_path, name):
    os.mkfifo(tmp_path / name)
    path = str(tmp_path / name)
    for read in (FullFiles(path).open, read_whole):
        with pytest.raises(OSError, match="named pipe"):
            read(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_files_are_closed_with_the_last_reference_and_never_in_a_fork(tmp_path):
    """A fork that closed its files, and opened a socket under the same number, lost the socket when garbage was collected."""
    path = os.path.realpath(tmp_path / "state.bin")
    torch.save({"weight": torch.ones(3), "groups": [{"step": torch.ones(())}]}, path)
    gc.disable()
    try:
        state = FullFiles(path).open(path)
        copied = copy.deepcopy(state)
        assert open_files(path) == 1 and copied["weight"] is state["weight"]
        del copied
        child = os.fork()
        if child == 0:
            number = next(
                n for n in map(int, os.listdir("/proc/self/fd")) if os.path.realpath(f"/proc/self/fd/{n}") == path
            )
            os.dup2(os.open(os.devnull, os.O_RDONLY), number)
            del state
            gc.collect()
            os._exit(0 if os.path.realpath(f"/proc/self/fd/{number}") == os.devnull else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del state
        assert open_files(path) == 0
    finally:
        gc.enable()
