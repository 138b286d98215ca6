"""Checkpoints in an object store, of one process and several: saved, loaded, rotated, damaged, from several nodes.

The first argument is the URL below which the checkpoints go; a second one names a single check.
"""

import os
import sys
import uuid

from check_checkpoint import Job, differing
from fsspec.core import url_to_fs
from harness import everywhere, fresh_accelerator, raised, run

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.checkpoint.storage import storage_of
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration

BASE = sys.argv.pop(1)


def fresh_url():
    """Return a URL below which there is nothing, the same on all ranks."""
    return f"{BASE}/{everywhere(uuid.uuid4().hex)[0]}"


def training_continues_as_if_it_had_not_stopped():
    url = f"{fresh_url()}/checkpoint"
    whole = Job()
    whole.epoch()
    assert whole.accelerator.save_state(url) == url
    losses, end = whole.epoch(), whole.everything()
    resumed = Job(seed=2)
    assert resumed.accelerator.load_state(url) == url
    assert resumed.epoch() == losses
    assert differing(resumed.everything(), end) == []
    resumed.accelerator.save_state(url)  # over the former one
    again = Job(seed=3)
    again.accelerator.load_state(url)
    assert differing(again.everything(), end) == []


def checkpoints_are_numbered_and_old_ones_removed():
    project = fresh_url()

    def configuration():
        return ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=2)

    job = Job(project_config=configuration())
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
        newer.upload(staged)
    job.accelerator.wait_for_everyone()
    resumed = Job(seed=2, project_config=configuration())
    assert resumed.accelerator.load_state() == folder.child("checkpoint_2").location
    assert differing(resumed.everything(), saved) == []
    resumed.epoch()
    resumed.accelerator.save_state()
    resumed.accelerator.wait_for_everyone()
    assert [(number, place.state().kind) for number, place in folder.checkpoints()] == [
        (2, "complete"),
        (3, "complete"),
    ]
    assert folder.leftovers() == {}


def a_save_in_the_background():
    url = f"{fresh_url()}/checkpoint"
    job = Job()
    job.epoch()
    saved = job.everything()
    job.accelerator.save_state(url, blocking=False)
    job.epoch()
    job.accelerator.wait_for_checkpoint()
    job.accelerator.wait_for_everyone()
    resumed = Job(seed=2)
    resumed.accelerator.load_state(url)
    assert differing(resumed.everything(), saved) == []


def what_is_damaged_changes_nothing():
    url = f"{fresh_url()}/checkpoint"
    job = Job()
    job.accelerator.save_state(url)
    job.accelerator.wait_for_everyone()
    place, (store, folder) = storage_of(url), url_to_fs(url)
    (name,) = [name for name in store.find(folder) if name.endswith("optimizer.bin")]
    whole = store.cat_file(name)
    flipped = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    for data, message in (
        (whole[:-1], "optimizer.bin has"),
        (flipped, "optimizer.bin has changed"),
        (None, "is missing"),
    ):
        job.accelerator.wait_for_everyone()
        if job.accelerator.is_main_process:
            if data is None:
                store.rm_file(name)
            else:
                store.pipe_file(name, data)
        job.accelerator.wait_for_everyone()
        before = job.everything()
        # A process does not download again what it has: another one would see what was changed since.
        place.release()
        with raised(DamagedCheckpoint, message):
            job.accelerator.load_state(url)
        assert differing(job.everything(), before) == []


def several_nodes_upload_into_one_checkpoint():
    """Each process stands for a node with a disk of its own."""
    state = PartialState()
    place = storage_of(f"{fresh_url()}/checkpoint")
    file = f"rank_{state.process_index}.bin"
    for step in (1, 2):
        staged = place.stage()
        place.generation = everywhere(place.generation)[0]
        entry = formats.write_bytes(os.path.join(staged, file), b"%d" % step * 1000, state.process_index)
        place.upload(staged)
        entries = dict(everywhere((file, entry)))
        if state.is_main_process:
            Manifest(entries, world_size=state.num_processes, step=step).write(staged)
            place.publish()
        else:
            assert os.listdir(staged) == []
        state.wait_for_everyone()
        assert (place.state().kind, place.state().manifest.step) == ("complete", step)
        assert place.state().manifest.files.keys() == entries.keys()
        with open(os.path.join(place.fetch(file.__eq__), file), "rb") as opened:
            assert opened.read() == b"%d" % step * 1000
        state.wait_for_everyone()


def an_accelerator_on_several_nodes():
    """Saving and loading where each process believes that it is alone on its node."""
    url = f"{fresh_url()}/checkpoint"
    job = Job()
    job.epoch()
    before, state = os.environ.get("LOCAL_WORLD_SIZE"), job.accelerator.state
    shared = state._shared_state if hasattr(state, "_shared_state") else {}
    local = shared.get("local_process_index")
    try:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        PartialState._shared_state["local_process_index"] = shared["local_process_index"] = 0
        for _ in range(2):
            job.epoch()
            job.accelerator.save_state(url)
        saved = job.everything()
        resumed = Job(seed=2)
        resumed.accelerator.load_state(url)
        assert differing(resumed.everything(), saved) == []
    finally:
        PartialState._shared_state["local_process_index"] = shared["local_process_index"] = local
        os.environ.pop("LOCAL_WORLD_SIZE") if before is None else os.environ.update(LOCAL_WORLD_SIZE=before)


if __name__ == "__main__":
    fresh_accelerator()
    run(
        training_continues_as_if_it_had_not_stopped,
        checkpoints_are_numbered_and_old_ones_removed,
        a_save_in_the_background,
        what_is_damaged_changes_nothing,
        several_nodes_upload_into_one_checkpoint,
        an_accelerator_on_several_nodes,
    )
