"""Checkpoints in an object store, below the URL in STORE_URL: saved, replaced, loaded, rotated, from several nodes."""

import os
import uuid

from check_checkpoint import Job
from expect import differing
from harness import everywhere, fresh_accelerator

from accelerate.checkpoint import formats
from accelerate.checkpoint.storage import storage_of
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration

BASE = os.environ["STORE_URL"]


def fresh_url():
    """Return a URL below which there is nothing, the same on all ranks."""
    fresh_accelerator()
    return f"{BASE}/{everywhere(uuid.uuid4().hex)[0]}"


def check_training_continues_as_if_it_had_not_stopped():
    url = f"{fresh_url()}/checkpoint"
    whole = Job()
    whole.epoch()
    assert whole.accelerator.save_state(url) == url
    losses, end = whole.epoch(), whole.everything()
    resumed = Job(seed=2)
    assert resumed.accelerator.load_state(url) == url
    assert resumed.epoch() == losses
    assert differing(resumed.everything(), end) == []
    resumed.accelerator.save_state(url, blocking=False)  # over the former one
    resumed.epoch()
    resumed.accelerator.wait_for_checkpoint()
    resumed.accelerator.wait_for_everyone()
    again = Job(seed=3)
    again.accelerator.load_state(url)
    assert differing(again.everything(), end) == []


def check_checkpoints_are_numbered_and_old_ones_removed():
    project = fresh_url()
    naming = {"automatic_checkpoint_naming": True, "total_limit": 2}
    job = Job(project_config=ProjectConfiguration(project, **naming))
    for _ in range(3):
        job.epoch()
        job.accelerator.save_state()
    saved = job.everything()
    job.accelerator.wait_for_everyone()
    folder = storage_of(project).child("checkpoints")
    assert [number for number, _ in folder.checkpoints()] == [1, 2]
    job.accelerator.wait_for_everyone()
    if job.accelerator.is_main_process:
        newer = folder.child("checkpoint_3")
        staged = newer.stage()
        formats.write_bytes(os.path.join(staged, "model.safetensors"), b"of a killed save")
        newer.sync(staged, ["model.safetensors"])
    job.accelerator.wait_for_everyone()
    resumed = Job(seed=2, project_config=ProjectConfiguration(project, **naming))
    assert resumed.accelerator.load_state() == folder.child("checkpoint_2").location
    assert differing(resumed.everything(), saved) == []
    resumed.epoch()
    resumed.accelerator.save_state()
    resumed.accelerator.wait_for_everyone()
    kept = {number: place.state().kind for number, place in folder.checkpoints()}
    assert kept == {2: "complete", 3: "complete"}
    assert folder.leftovers() == {}


def check_files_of_hooks_come_along():
    url = f"{fresh_url()}/checkpoint"
    job = Job()

    def write(models, states, folder):
        with open(os.path.join(folder, f"hook_{job.accelerator.process_index}.txt"), "w") as file:
            file.write("from a hook")

    job.accelerator.register_save_state_pre_hook(write)
    job.accelerator.save_state(url)
    job.accelerator.wait_for_everyone()
    storage = storage_of(url)
    folder = storage.fetch()
    for rank in range(job.accelerator.num_processes):
        with open(os.path.join(folder, f"hook_{rank}.txt")) as file:
            assert file.read() == "from a hook"
    storage.release()
    Job(seed=2).accelerator.load_state(url)


def check_an_accelerator_on_several_nodes():
    """Each process believes that it is alone on its node; this check comes last, because it stays so."""
    url = f"{fresh_url()}/checkpoint"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    PartialState._shared_state["local_process_index"] = 0
    job = Job()
    assert job.accelerator.local_process_index == 0
    for _ in range(2):
        job.epoch()
        job.accelerator.save_state(url)
    saved = job.everything()
    resumed = Job(seed=2)
    resumed.accelerator.load_state(url)
    assert differing(resumed.everything(), saved) == []
