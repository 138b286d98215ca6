"""Checkpoints of models that torch spreads over ranks: what one strategy writes any other loads, on any number of ranks.

A trial trains a model under one strategy on some ranks, saves it, and continues for two steps. Others load the checkpoint, find
weights and optimizer bit for bit, and continue for the same two steps. Data are the same on all ranks; the numbers of ranks are
those of process groups that a part of the processes forms, while the rest waits.
"""

import copy
import functools
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from expect import differing, raised
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sharded_io
from accelerate import PartialState
from accelerate.checkpoint import dcp, formats, model_io, state
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.extensions.convert.convert import reshard
from accelerate.utils import fsdp_utils


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, x):
        return x + self.value.sum()


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen one, a tiny one, and a buffer."""

    def __init__(self, vocabulary=11, width=4, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = Frozen()
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.arange(3.0))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.frozen(self.head(x * self.scale))


def spread(strategy, model):
    world = dist.get_world_size()
    if strategy == "plain":
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy.startswith("fsdp1"):
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD} if strategy == "fsdp1-hybrid" else {}
        if strategy == "fsdp1-hybrid":
            options["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy([Block, Frozen]),
            use_orig_params=strategy != "fsdp1-flat",
            device_id=torch.device("cpu"),
            **options,
        )
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
    elif strategy == "hsdp2":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        shape = (world,) if strategy == "tp" else (world // 2, 2)
        whole = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tp")[2 - len(shape) :])
        mesh = whole["tp"] if len(shape) == 2 else whole
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        if strategy == "tp":
            return model
        mesh = whole["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Job:
    """A model under a strategy, and its optimizer with two groups (one, where parameters are flat)."""

    def __init__(self, strategy, seed=0):
        torch.manual_seed(seed)
        self.strategy = strategy
        self.model = spread(strategy, Net())
        parameters = dict(self.model.named_parameters())
        plain = [p for name, p in parameters.items() if "blocks" not in name]
        others = [p for name, p in parameters.items() if "blocks" in name]
        groups = [{"params": plain, "lr": 0.02}, {"params": others, "weight_decay": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)

    def step(self, number):
        tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(number))
        loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def whole(self):
        """Return model and optimizer as plain tensors by name, on rank 0."""
        whole = {
            "model": state.gathered(model_io.io_of(self.model).model_state(self.model).values),
            "optimizer": state.gathered(model_io.io_of(self.model).optimizer_state(self.optimizer, self.model)),
        }
        return copy.deepcopy(whole)  # what was not spread is no copy

    def save(self, folder, layout):
        if layout == "numbered":  # as strategies save that keep the model whole
            if dist.get_rank() == 0:
                os.makedirs(folder)
                torch.save(
                    model_io.io_of(self.model).unwrapped(self.model).state_dict(), f"{folder}/pytorch_model.bin"
                )
                torch.save(self.optimizer.state_dict(), f"{folder}/optimizer.bin")
                sharded_io.write_names(self.optimizer, self.model, folder)
                written = {name: formats.describe(os.path.join(folder, name)) for name in os.listdir(folder)}
                Manifest(written).write(folder)
            dist.barrier()
            return
        sharded_io.save_model(self.model, folder, layout=layout)
        sharded_io.save_optimizer(self.optimizer, self.model, folder, layout=layout)

    def load(self, folder):
        sharded_io.load_model(self.model, folder)
        sharded_io.load_optimizer(self.optimizer, self.model, folder)


def unlike(mine, theirs):
    """Where two states differ, but for the numbers of parameters."""
    return [where for where in differing(mine, theirs) if "/params/" not in where]


class Stage:
    """All processes, and the process groups that the first of them form."""

    def __init__(self):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = os.path.join(os.getcwd(), "stage")
        os.makedirs(self.folder, exist_ok=True)
        self.everybody = dist.FileStore(os.path.join(self.folder, "everybody"), self.size)
        self.phase = 0

    def on(self, ranks, work, *arguments):
        """Do something on the first ``ranks`` processes, in a separate process group. All processes."""
        self.phase += 1
        if self.rank < ranks:
            store = dist.FileStore(os.path.join(self.folder, f"group{self.phase}"), ranks)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=ranks)
            work(*arguments)
            dist.barrier()
            dist.destroy_process_group()
        self.everybody.add(f"done{self.phase}", 1)
        while int(self.everybody.add(f"done{self.phase}", 0)) < self.size:
            time.sleep(0.005)


RESHARDED = "-resharded"
STAGE = Stage()


def staged(ranks):
    """Let a check run on so many ranks, with a separate name for folders."""

    def stage(check):
        return functools.wraps(check)(lambda: STAGE.on(ranks, check, os.path.join(STAGE.folder, check.__name__)))

    return stage


def trial(writer, layout, writers, *readings, resharded=None):
    """Write with one strategy, and read with others: pairs of a number of ranks and the names of strategies.

    ``resharded`` is what the checkpoint is made into in between, without a process group.
    """
    folder = os.path.join(STAGE.folder, f"{STAGE.phase}-{writer}-{layout}-{writers}")
    STAGE.on(writers, write, folder, writer, layout)
    if resharded:
        STAGE.on(1, reshard, folder, folder + RESHARDED, *resharded)
        folder = folder + RESHARDED
    for ranks, strategies in readings:
        STAGE.on(ranks, read, folder, strategies.split())


def write(folder, strategy, layout):
    job = Job(strategy)
    for number in range(3):
        job.step(number)
    job.save(folder, layout)
    saved = job.whole()
    losses = [job.step(number) for number in (3, 4)]
    after = job.whole()
    if dist.get_rank() == 0:
        torch.save({"saved": saved, "losses": losses, "after": after}, f"{folder.removesuffix(RESHARDED)}.expected")


def read(folder, strategies):
    expected = torch.load(f"{folder.removesuffix(RESHARDED)}.expected")
    problems = []
    for strategy in strategies:
        job = Job(strategy, seed=1)
        if strategy.startswith("fsdp"):
            job.step(0)  # an optimizer with a separate state
        job.load(folder)
        loaded = job.whole()
        losses = [job.step(number) for number in (3, 4)]
        after = job.whole()
        if dist.get_rank() == 0:
            found = unlike(expected["saved"], loaded)
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-6)
            for name, value in expected["after"]["model"].items():
                if not torch.allclose(value, after["model"][name], rtol=1e-4, atol=1e-6):
                    found.append(f"after two steps {name}: {(value - after['model'][name]).abs().max()}")
            problems += [f"{strategy}: {where}" for where in found]
    assert not problems, f"{folder} on {dist.get_world_size()}: " + "\n".join(problems)


def check_each_strategy_reads_what_the_others_write():
    trial("fsdp2", "sharded", 2, (3, "fsdp1 tp ddp"), (1, "fsdp1-flat fsdp2 plain"))
    trial("fsdp1", "sharded", 2, (3, "fsdp2 fsdp1-flat"), (1, "plain"))
    trial("fsdp1-flat", "sharded", 2, (1, "fsdp1-flat fsdp2"), (3, "fsdp1"))
    trial("tp", "sharded", 2, (3, "tp fsdp2"))
    trial("ddp", "numbered", 1, (2, "fsdp1 fsdp1-flat fsdp2 tp"))
    trial("ddp", "numbered", 2, (3, "fsdp1-flat fsdp2"), resharded=("sharded", 2))
    trial("fsdp2", "sharded", 3, (1, "plain"), (2, "fsdp1 tp"), resharded=("full",))
    trial("fsdp2", "full", 2, (1, "plain fsdp1"), (3, "fsdp2 tp"))
    trial("fsdp1", "full", 2, (2, "fsdp1-flat ddp"))


@staged(2)
def check_a_rank_that_fails_stops_all_before_anything_changes(folder):
    for strategy in ("fsdp1", "fsdp2"):
        job, here = Job(strategy), f"{folder}-{strategy}"
        job.step(0)
        job.save(here, "sharded")
        job.step(1)
        before = job.whole()
        read_data, write_torch = FileSystemReader.read_data, formats.write_torch
        if dist.get_rank() == 1:
            FileSystemReader.read_data = lambda *_: 1 / 0
        else:
            formats.write_torch = lambda *_: 1 / 0
        for work, culprit in (
            (partial(sharded_io.load_model, job.model, here), 1),
            (partial(sharded_io.load_optimizer, job.optimizer, job.model, here), 1),
            (partial(sharded_io.save_model, job.model, here, 0, "full"), 0),
        ):
            mine = dist.get_rank() == culprit
            own = (DamagedCheckpoint, ZeroDivisionError), ""
            with raised(*(own if mine else (RuntimeError, f"Rank {culprit} failed"))):
                work()
        FileSystemReader.read_data, formats.write_torch = read_data, write_torch
        assert not unlike(before, job.whole())


@staged(STAGE.size)
def check_one_rank_that_cannot_begin_or_merge_keeps_nobody_waiting(folder):
    rank, job, mine = dist.get_rank(), Job("fsdp2"), folder
    job.step(0)
    if rank == 1:
        open(f"{folder}-file", "w").close()
        mine = f"{folder}-file/checkpoint"
    kind = NotADirectoryError if rank == 1 else RuntimeError
    with raised(kind, "Not a directory"):
        sharded_io.save_model(job.model, mine)
    with raised(kind, "Not a directory"):
        sharded_io.save_optimizer(job.optimizer, job.model, mine)

    PartialState(cpu=True)
    sharded_io.save_model(job.model, folder)
    shards, merged = f"{folder}/pytorch_model_fsdp_0", f"{folder}-merged"
    file = f"{shards}/__0_0.distcp"
    if rank == 0:
        os.rename(file, f"{file}.aside")
    dist.barrier()
    with raised(DamagedCheckpoint if rank == 0 else RuntimeError, "__0_0.distcp is missing"):
        fsdp_utils.merge_fsdp_weights(shards, merged, remove_checkpoint_dir=True)
    assert os.path.exists(f"{shards}/.metadata") and not os.path.exists(merged)
    dist.barrier()
    if rank == 0:
        os.rename(f"{file}.aside", file)
    if rank == 1:
        time.sleep(0.5)  # when it comes, the shards must not be gone yet
    fsdp_utils.merge_fsdp_weights(shards, merged, remove_checkpoint_dir=True)
    assert os.listdir(merged) == ["model.safetensors"] and not os.path.exists(shards)
    PartialState._reset_state()


@staged(1)
def check_flat_parameters_need_names(folder):
    plain = Job("plain")
    plain.step(0)
    os.makedirs(folder)
    torch.save(plain.model.state_dict(), f"{folder}/pytorch_model.bin")
    torch.save(plain.optimizer.state_dict(), f"{folder}/optimizer.bin")
    job = Job("fsdp1-flat", seed=1)
    sharded_io.load_model(job.model, folder)
    with raised(RuntimeError, "use_orig_params=True"):
        sharded_io.load_optimizer(job.optimizer, job.model, folder)
    assert not job.optimizer.state
    job = Job("fsdp1", seed=1)
    job.load(folder)
    found = unlike(plain.whole(), job.whole())
    assert not found, found


@staged(2)
def check_what_is_missing_is_refused_or_left_out(folder):
    for strategy in ("fsdp1", "fsdp1-flat", "fsdp2"):
        job, other = Job(strategy), Job(strategy, seed=1)
        values = model_io.io_of(job.model).model_state(job.model).values
        values = {name: value for name, value in values.items() if name != "scale"}
        dcp.save({"model": values}, f"{folder}-{strategy}/pytorch_model_fsdp_0")
        with torch.no_grad():
            for name, parameter in other.model.named_parameters():
                if name.endswith("scale"):
                    parameter.fill_(7)
        before = other.whole()["model"]
        with raised(RuntimeError, "scale is missing"):
            sharded_io.load_model(other.model, f"{folder}-{strategy}")
        keys = sharded_io.load_model(other.model, f"{folder}-{strategy}", strict=False)
        assert keys.missing_keys == ["scale"] and not keys.unexpected_keys, keys
        mine, theirs = job.whole()["model"], other.whole()["model"]
        if dist.get_rank() == 0:
            mine["scale"] = before["scale"]
        assert not unlike(mine, theirs), (strategy, unlike(mine, theirs))


EVERYBODY = "plain ddp fsdp1 fsdp1-flat fsdp2 tp"


def the_wide_matrix():
    writer = os.environ["WRITER"]
    for layout in ("sharded", "full", *(["numbered"] if writer in ("plain", "ddp") else [])):
        for writers in (1, 2, 4):
            trial(writer, layout, writers, *((ranks, EVERYBODY) for ranks in (1, 2, 3, 4)))


def meshes_of_two_dims():
    readers = (4, "fsdp2-tp hsdp2 fsdp1-hybrid fsdp2 tp"), (2, "fsdp1 fsdp2 fsdp1-flat"), (1, "plain")
    for writer in ("hsdp2", "fsdp2-tp", "fsdp1-hybrid"):
        for layout in ("sharded", "full"):
            trial(writer, layout, 4, *readers)
    trial("fsdp2", "sharded", 2, (4, "hsdp2 fsdp2-tp fsdp1-hybrid"))
