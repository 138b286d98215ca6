"""Checkpoints of several processes: published once, in the background, on nodes with separate disks, loaded together."""

import dataclasses
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from check_checkpoint import Job
from expect import differing, raised
from harness import everywhere, fresh_accelerator, rank, shared_folder, world

from accelerate import ParallelismConfig
from accelerate.checkpoint import storage
from accelerate.checkpoint.apply import Contents
from accelerate.checkpoint.manifest import PARTS_FOLDER, DamagedCheckpoint, Manifest, files_below
from accelerate.checkpoint.ranks import CollectiveMisuse
from accelerate.checkpoint.storage import LocalStorage
from accelerate.extensions.big_models.loading import load_checkpoint_in_model
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration


def check_the_manifest_lists_what_every_rank_wrote():
    job = Job()
    with shared_folder() as home:
        folder = os.path.join(home, "c")

        def hook(models, weights, output_dir):
            Path(output_dir, f"of_rank_{rank()}.txt").write_text("mine")

        job.accelerator.register_save_state_pre_hook(hook)
        job.accelerator.save_state(folder)
        manifest = Manifest.read(folder)
        assert set(manifest.files) == files_below(folder) - {"accelerate_manifest.json"}
        assert manifest.world_size == world() and manifest.strategy == ("ddp" if world() > 1 else "single")
        for each in range(world()):
            assert manifest.files[f"random_states_{each}.pkl"].rank == each
            assert manifest.files[f"of_rank_{each}.txt"].size == 4
        job.accelerator.wait_for_everyone()  # the rank that publishes removes the hidden folder when all know the outcome
        assert os.listdir(home) == ["c"]


def check_what_is_saved_in_the_background_is_the_state_of_the_call():
    with shared_folder() as folder:
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=3, async_save=True)
        job = Job(project_config=config)
        expected = []
        for _ in range(4):
            job.steps(1)
            expected.append(job.everything())
            job.accelerator.save_state()
            job.steps(2)  # collectives of the training continue next to the save
        job.accelerator.wait_for_checkpoint()
        job.accelerator.wait_for_everyone()
        checkpoints = Path(folder, "checkpoints")
        assert sorted(os.listdir(checkpoints)) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
        for number in (1, 2, 3):
            other = Job(seed=7)
            other.accelerator.load_state(checkpoints / f"checkpoint_{number}")
            assert not differing(other.everything(), expected[number]), number


def check_an_error_in_the_background_reaches_every_rank():
    """`wait_for_checkpoint` is for any rank alone: the others hear of the failure at the next call."""
    for alone in (False, True):
        with shared_folder() as folder:
            job, target = Job(), os.path.join(folder, "c")
            job.accelerator.save_state(target)
            before, real = Manifest.read(target), os.fsync
            if job.accelerator.is_last_process:
                os.fsync = refuse
            job.accelerator.save_state(target, blocking=False)
            if job.accelerator.is_main_process or not alone:
                with raised(RuntimeError, "could not be saved in the background", "no space left"):
                    job.accelerator.wait_for_checkpoint()
            if alone:
                with raised(RuntimeError, "no space left"):
                    job.accelerator.save_state(target)
            os.fsync = real
            job.accelerator.wait_for_everyone()
            assert Manifest.read(target) == before and os.listdir(folder) == ["c"]
            job.accelerator.wait_for_everyone()
            job.accelerator.save_state(target)
            job.accelerator.load_state(target)


def check_one_that_cannot_copy_its_state_is_heard_of_in_the_same_call():
    with shared_folder() as folder:
        job = Job()
        job.counter.state["lock"] = threading.Lock() if job.accelerator.is_main_process else None
        with raised((TypeError, RuntimeError), "lock"):
            job.accelerator.save_state(os.path.join(folder, "c"), blocking=False)
        job.counter.state["lock"] = None
        job.accelerator.wait_for_everyone()  # one of them clears up
        assert os.listdir(folder) == []
        job.accelerator.wait_for_everyone()
        job.accelerator.save_state(os.path.join(folder, "c"), blocking=False)
        job.accelerator.wait_for_checkpoint()


def check_one_whose_hook_fails_does_not_wait_for_those_that_wait_for_it():
    sharded = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="FULL_STATE_DICT")
    for kind in ({}, {"fsdp_plugin": sharded}, {"parallelism_config": ParallelismConfig(tp_size=world())}):
        accelerator = prepared_layers(**kind)
        first, group = accelerator.is_main_process, dist.new_group(backend="gloo")

        def hook(models, weights, output_dir, first=first, group=group):
            if first:
                raise OSError("the hook has no disk")
            dist.barrier(group)

        accelerator.register_save_state_pre_hook(hook)
        # The others are let go by the failed rank, once it has its error: it would hang, if it waited for them.
        with shared_folder() as folder:
            with raised((OSError, RuntimeError), "the hook has no disk" if first else "cannot continue"):
                accelerator.save_state(folder)
            if first:
                dist.barrier(group)


def prepared_layers(**options):
    """Return an accelerator that has prepared layers, which any strategy can split, with an optimizer that has a state."""
    accelerator = fresh_accelerator(**options)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4))
    layers._tp_plan = {"0": "colwise_rep"}
    layers, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters()))
    accelerator.backward(layers(torch.ones(2, 4)).sum())
    optimizer.step()
    return accelerator


def check_variables_of_a_launcher_may_be_wrong():
    """Nothing is loaded that no rank has looked at."""
    with shared_folder() as folder:
        job = Job()
        job.accelerator.save_state(folder)
        before = os.environ["LOCAL_WORLD_SIZE"]
        os.environ["LOCAL_WORLD_SIZE"] = "8"
        for name in sorted(Manifest.read(folder).files):
            path = Path(folder, name)
            data = path.read_bytes()
            job.accelerator.wait_for_everyone()
            if job.accelerator.is_last_process:
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            job.accelerator.wait_for_everyone()
            what = "is not the part of a manifest" if name.startswith(PARTS_FOLDER) else "has changed"
            with raised(DamagedCheckpoint, f"{name} {what}"):
                job.accelerator.load_state(folder)
            job.accelerator.wait_for_everyone()
            if job.accelerator.is_last_process:
                path.write_bytes(data)
        job.accelerator.wait_for_everyone()
        os.environ["LOCAL_WORLD_SIZE"] = before
        job.accelerator.load_state(folder)


def refuse(descriptor):
    raise OSError("no space left")


def check_what_one_rank_cannot_load_no_rank_loads():
    with shared_folder() as folder:
        job = Job()
        job.steps(2)
        job.accelerator.save_state(folder)
        other = Job(seed=3)
        other.steps(1)
        before = other.everything()
        error = ValueError("this counter takes no state")
        other.counter.loading = error if other.accelerator.is_last_process else None
        with raised((ValueError, RuntimeError), "this counter takes no state"):
            other.accelerator.load_state(folder)
        assert not differing(other.everything(), before)


def check_an_error_that_comes_last_is_heard_of_by_all_ranks():
    """After an interrupt a rank loads nothing again, whatever becomes of the checkpoint on other ranks."""
    job, real = Job(), Contents.complete
    last, main = job.accelerator.is_last_process, job.accelerator.is_main_process

    def stop(*args):
        raise KeyboardInterrupt("by the user")

    def replace(models, folder):
        os.utime(os.path.join(folder, "accelerate_manifest.json"), ns=(1, 1))

    with shared_folder() as folder:
        job.accelerator.save_state(folder)
        Contents.complete = stop if last else real
        for _ in range(5):  # ranks of one round leave in any order
            with raised((KeyboardInterrupt, RuntimeError), "by the user"):
                job.accelerator.load_state(folder)
        Contents.complete = real
        job.accelerator.wait_for_everyone()
        handle = job.accelerator.register_load_state_pre_hook(
            stop if last else replace if main else lambda *args: None
        )
        with raised((KeyboardInterrupt, RuntimeError), "by the user"):
            job.accelerator.load_state(folder)
        handle.remove()
        job.accelerator.load_state(folder)


def check_a_project_that_cannot_be_listed_is_an_error_on_all_ranks():
    with shared_folder() as folder:
        job, real = (
            Job(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True)),
            LocalStorage.is_empty,
        )
        job.accelerator.save_state()

        def refuse_entry(entry):
            raise PermissionError("not for this user")

        LocalStorage.is_empty = refuse_entry
        with raised(OSError, "not for this user"):
            job.accelerator.load_state()
        LocalStorage.is_empty = real
        job.accelerator.load_state()


def check_a_link_that_leads_elsewhere_for_some_ranks_is_one_path():
    job, real = Job(), os.path.realpath
    with shared_folder() as folder:
        link = os.path.join(folder, "current")
        if job.accelerator.is_main_process:
            os.symlink("c1", link)
        job.accelerator.save_state(os.path.join(folder, "c1"))
        other = os.path.join(folder, "c0") if job.accelerator.is_last_process and world() > 1 else link
        os.path.realpath = lambda path, **options: real(other if path == link else path, **options)
        assert job.accelerator.load_state(link).name == "c1"
        os.path.realpath = real
        job.accelerator.wait_for_everyone()


def check_all_ranks_take_the_same_newest_one():
    with shared_folder() as folder:
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        job = Job(project_config=config)
        assert job.accelerator.load_state(latest=True, missing_ok=True) is None
        saved = []
        for _ in range(3):
            job.steps(1)
            saved.append(job.everything())
            job.accelerator.save_state()
        job.accelerator.wait_for_everyone()  # the rank that publishes removes older ones
        assert sorted(os.listdir(os.path.join(folder, "checkpoints"))) == ["checkpoint_1", "checkpoint_2"]
        job.accelerator.wait_for_everyone()
        if job.accelerator.is_main_process:
            os.unlink(os.path.join(folder, "checkpoints", "checkpoint_2", "optimizer.bin"))
        job.accelerator.wait_for_everyone()
        loaded = job.accelerator.load_state(latest=True)
        assert everywhere(loaded.name) == ["checkpoint_1"] * job.accelerator.num_processes
        assert not differing(job.everything(), saved[1])


def check_what_not_all_ranks_do_is_an_error_where_it_was_done():
    job = Job()
    with shared_folder() as folder:
        with raised(CollectiveMisuse, "c0", "c1", "rank 0", "rank 1"):
            job.accelerator.save_state(os.path.join(folder, f"c{rank()}"))
        if rank() == 0:
            with raised(CollectiveMisuse, "save_state", "check_saving.py", "rank 1"):
                job.accelerator.save_state(os.path.join(folder, "alone"))
        job.accelerator.wait_for_everyone()
        job.accelerator.save_state(os.path.join(folder, "together"))
        job.accelerator.wait_for_everyone()
        assert job.accelerator.load_state(os.path.join(folder, "together")).name == "together"
        assert os.listdir(folder) == ["together"]


def every_node_has_its_own():
    """Each rank is a node with a separate disk at the same path."""
    disk = os.environ["OWN_DISK"]
    project = ProjectConfiguration(disk, automatic_checkpoint_naming=True, total_limit=1, save_on_each_node=True)
    job = Job(project_config=ProjectConfiguration(save_on_each_node=True))
    assert job.accelerator.local_process_index == 0
    patience, storage.PATIENCE_S = storage.PATIENCE_S, 0.3
    with raised(RuntimeError, "omit save_on_each_node=True"):  # they share a disk
        job.accelerator.save_state(os.path.join(os.environ["SHARED_DISK"], "c"))
    storage.PATIENCE_S = patience
    job.accelerator.wait_for_everyone()
    for path in ("c", "named/checkpoint_0"):  # machines may have separate paths, too
        own = os.path.join(os.environ["SHARED_DISK"], f"node{rank()}", path)
        folder = own if path == "c" else os.path.dirname(own)
        with mock.patch("socket.gethostname", lambda: f"node{rank()}"):
            job.accelerator.save_state(own)
            assert str(job.accelerator.load_state(folder, latest=folder != own)) == own
    kinds = (
        {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
        {"parallelism_config": ParallelismConfig(tp_size=2)},
    )
    for kind in kinds:
        accelerator = prepared_layers(**kind, project_config=project)
        with raised((ValueError, RuntimeError), "save_on_each_node=True with the strategy"):
            accelerator.save_state()
        accelerator.save_model(accelerator._models[0], os.path.join(disk, "weights"))
        assert everywhere(os.path.exists(os.path.join(disk, "weights"))) == [True, False]
        shutil.rmtree(os.path.join(disk, "weights"), ignore_errors=True)
    for _ in range(10):  # both nodes write, into one folder
        job.accelerator.save_model(job.model, os.path.join(os.environ["SHARED_DISK"], "m"), max_shard_size=200)
    job.accelerator.wait_for_everyone()
    load_checkpoint_in_model(
        job.accelerator.unwrap_model(job.model), os.path.join(os.environ["SHARED_DISK"], "m"), strict=True
    )
    assert not [name for name in os.listdir(os.path.join(os.environ["SHARED_DISK"], "m")) if name.startswith(".")]
    job = Job(norm=False, project_config=project)
    job.steps(2)
    for blocking in (True, False):
        job.accelerator.save_state(blocking=blocking)
    job.accelerator.wait_for_checkpoint()
    here = Path(disk, "checkpoints", "checkpoint_1")
    assert os.listdir(here.parent) == [here.name], os.listdir(here.parent)
    manifest = Manifest.read(here)
    assert {f"random_states_{rank()}.pkl", "model.safetensors", "optimizer.bin"} <= set(manifest.files)
    assert f"random_states_{1 - rank()}.pkl" not in manifest.files
    saved = job.everything()
    job.steps(2)
    assert job.accelerator.load_state() == here and not differing(job.everything(), saved)
    # Damage on one node is heard of on the other.
    if rank() == 1:
        (here / "model.safetensors").unlink()
    with raised(DamagedCheckpoint, "model.safetensors is missing"):
        job.accelerator.load_state(here)
    # A run that ends after one node has published and before the other one has leaves different saves.
    one = str(job.accelerator.save_state())
    text = Manifest.read(one)
    if rank() == 1:
        dataclasses.replace(text, save="another one").write(one)
    before = job.everything()
    with raised(DamagedCheckpoint, "different saves"):
        job.accelerator.load_state(one)
    assert not differing(job.everything(), before)
    # The number of the next one is the same everywhere.
    if rank() == 1:
        damaged = Path(disk, "checkpoints", "checkpoint_6", ".incomplete")
        damaged.parent.mkdir()
        damaged.touch()
    job.accelerator.save_state()
    job.accelerator.load_state()
    assert job.accelerator.save_iteration == 7
