"""Names next to checkpoints that no run created, and files that a user changed: the same outcome on all ranks."""

import os
from pathlib import Path

import torch
from check_checkpoint import Job
from expect import differing, raised
from harness import rank, shared_folder
from safetensors.torch import load_file, save_file

from accelerate.checkpoint.manifest import NAME, PARAMETER_NAMES, PARTS_FOLDER, DamagedCheckpoint, Manifest
from accelerate.checkpoint.storage import storage_of
from accelerate.extensions.convert.accept import accept
from accelerate.utils import ProjectConfiguration


def check_links_in_hidden_folders_are_not_followed():
    with shared_folder() as home:
        outside, project = Path(home, "outside"), Path(home, "project")
        checkpoints = project / "checkpoints"
        job = Job(project_config=ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=1))
        if rank() == 0:
            outside.mkdir(), (outside / "mine.txt").touch(), checkpoints.mkdir(parents=True)
            for number, inner in enumerate([".former", ".removed", "checkpoint_0", "checkpoint_2"]):
                aside = checkpoints / f".saving_{number:016x}"
                aside.mkdir(), (aside / inner).symlink_to(outside)
                (aside / ".accelerate_save").write_text(inner if number > 1 else f"checkpoint_{number}")
            (checkpoints / "checkpoint_9").symlink_to("checkpoint_9")
            (checkpoints / "checkpoint_\u0669").mkdir()
        job.accelerator.wait_for_everyone()
        for blocking in (True, False, True):
            job.accelerator.save_state(blocking=blocking)
        saved = job.everything()
        job.steps(1)
        assert job.accelerator.load_state(latest=True).name == "checkpoint_2"
        assert not differing(job.everything(), saved)
        job.accelerator.wait_for_everyone()
        links = [path for path in checkpoints.glob(".saving_*/*") if path.is_symlink()]
        assert os.listdir(outside) == ["mine.txt"] and len(links) == 4, links
        kept = sorted(path.name for path in checkpoints.iterdir() if not path.name.startswith("."))
        assert kept == ["checkpoint_2", "checkpoint_9", "checkpoint_\u0669"], kept
        job.accelerator.wait_for_everyone()


def check_a_pipe_in_the_place_of_a_file_is_named_on_every_rank():
    with shared_folder() as home:
        job, folder = Job(), Path(home, "c")
        job.accelerator.save_state(folder)
        job.accelerator.wait_for_everyone()
        if rank() == 0:
            (folder / NAME).unlink(), (folder / PARAMETER_NAMES).unlink(missing_ok=True)
            for part in (folder / PARTS_FOLDER).glob("*"):
                part.unlink()
            if (folder / PARTS_FOLDER).exists():
                (folder / PARTS_FOLDER).rmdir()
        for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
            job.accelerator.wait_for_everyone()
            if rank() == 0:
                (folder / name).rename(Path(home, "aside"))
                os.mkfifo(folder / name)
            job.accelerator.wait_for_everyone()
            with raised((OSError, RuntimeError), name, "named pipe"):
                job.accelerator.load_state(folder)
            job.accelerator.wait_for_everyone()
            if rank() == 0:
                (folder / name).unlink(), Path(home, "aside").rename(folder / name)
        job.accelerator.wait_for_everyone()
        job.accelerator.load_state(folder)


def check_accepted_files_load():
    with shared_folder() as home:
        job, folder = Job(), Path(home, "c")
        job.accelerator.save_state(folder)
        job.accelerator.wait_for_everyone()
        if rank() == 0:
            weights = {name: torch.ones_like(value) for name, value in load_file(folder / "model.safetensors").items()}
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        job.accelerator.wait_for_everyone()
        with raised(DamagedCheckpoint, "model.safetensors", f"accelerate checkpoint accept {folder}"):
            job.accelerator.load_state(folder)
        job.accelerator.wait_for_everyone()
        if rank() == 0:
            listing = Manifest.read(folder)
            assert accept(storage_of(folder)) and not (folder / PARTS_FOLDER).exists()
            files = {name: entry.rank for name, entry in listing.files.items() if PARTS_FOLDER not in name}
            assert {name: entry.rank for name, entry in Manifest.read(folder).files.items()} == files
        job.accelerator.wait_for_everyone()
        job.accelerator.load_state(folder)
        assert all(torch.equal(value, torch.ones_like(value)) for value in job.model.parameters())
