"""A save that continues after its call: its error is reported by the next call, and its memory comes back."""

import copy
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpoint.ranks import CollectiveMisuse, Ranks
from accelerate.config.project import ProjectConfiguration
from accelerate.extensions.async_save.saves import AsyncSaves


class Run:
    def __init__(self, folder=None) -> None:
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=folder is not None)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        self.model = self.accelerator.prepare(torch.nn.Linear(3, 2))

    def fail_to_save(self, monkeypatch, *folder):
        """Save in the background, where it fails, and wait for the thread."""
        with monkeypatch.context() as patch:
            patch.setattr("accelerate.checkpoint.formats.os.fsync", lambda descriptor: 1 / 0)
            self.accelerator.save_state(*folder, blocking=False)
            self.background._thread.join()

    @property
    def background(self):
        (saves,) = self.accelerator.extensions.of_kind(AsyncSaves)
        return saves.background


@pytest.mark.parametrize("next_call", ["save_state", "load_state", "wait_for_checkpoint", "end_training"])
def test_an_error_of_the_background_comes_out_of_the_next_call(tmp_path, monkeypatch, next_call):
    run = Run(tmp_path)
    run.accelerator.save_state()
    run.fail_to_save(monkeypatch)
    with pytest.raises(RuntimeError, match="checkpoint_1.*could not be saved.*division by zero"):
        getattr(run.accelerator, next_call)()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0"]
    run.accelerator.save_state()
    assert run.accelerator.load_state().name == "checkpoint_2"


def test_a_wrong_argument_leaves_the_error_of_the_background_for_the_next_call(tmp_path, monkeypatch):
    run = Run()
    run.fail_to_save(monkeypatch, tmp_path / "c")
    with pytest.raises(TypeError, match="map_location"):
        run.accelerator.load_state(tmp_path / "c", map_location="nowhere")
    with pytest.raises(ValueError, match="no output_dir"):
        run.accelerator.save_state()
    with monkeypatch.context() as patch, pytest.raises(CollectiveMisuse):
        patch.setattr(Ranks, "agree", refuse_to_agree)
        run.accelerator.save_state(tmp_path / "c")
    with pytest.raises(RuntimeError, match="could not be saved.*division by zero"):
        run.accelerator.save_state(tmp_path / "c")
    run.accelerator.save_state(tmp_path / "c")


def refuse_to_agree(*args):
    raise CollectiveMisuse("another rank loads")


def test_a_failed_save_does_not_keep_trackers_from_finishing(tmp_path, monkeypatch):
    run, finished = Run(), []
    run.accelerator.trackers = [SimpleNamespace(name="tracker", finish=lambda: finished.append(1))]
    run.fail_to_save(monkeypatch, tmp_path / "c")
    with pytest.raises(RuntimeError, match="could not be saved.*division by zero"):
        run.accelerator.end_training()
    assert finished == [1]


def test_a_save_that_reports_the_former_error_is_not_written_and_has_no_number(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.accelerator.save_state()
    run.fail_to_save(monkeypatch)
    with pytest.raises(RuntimeError, match="checkpoint_1.*could not be saved"):
        run.accelerator.save_state(blocking=False)
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
    assert run.accelerator.save_state(blocking=False).name == "checkpoint_2"
    run.accelerator.wait_for_checkpoint()


def test_a_state_that_cannot_be_copied_is_reported_by_the_call(tmp_path):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

        def get_extra_state(self):
            return {"lock": self.lock}

    run = Run(tmp_path)
    run.accelerator.register_for_checkpointing(Holder())
    with pytest.raises(TypeError, match="lock"):
        run.accelerator.save_state(blocking=False)
    assert os.listdir(tmp_path / "checkpoints") == []
    run.accelerator._custom_objects.clear()
    run.accelerator.save_state(blocking=False)
    run.accelerator.wait_for_checkpoint()


@pytest.mark.parametrize("copied", [copy.copy, lambda accelerator: pickle.loads(pickle.dumps(accelerator))])
def test_a_copied_accelerator_saves_in_the_background(tmp_path, monkeypatch, copied):
    run = Run()
    run.accelerator.save_state(tmp_path / "first", blocking=False)
    run.accelerator.wait_for_checkpoint()
    other = copied(run.accelerator)
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.checkpoint.formats.os.fsync", lambda descriptor: 1 / 0)
        other.save_state(tmp_path / "second", blocking=False)
        other.extensions.of_kind(AsyncSaves)[0].background._thread.join()
    with pytest.raises(RuntimeError, match="second.*could not be saved"):
        other.load_state(tmp_path / "first")
    other.load_state(tmp_path / "first")


def test_memory_is_released_with_what_is_prepared(tmp_path):
    run = Run()
    run.accelerator.save_state(tmp_path / "c", blocking=False)
    run.accelerator.wait_for_checkpoint()
    assert run.background.buffers._free
    run.accelerator.free_memory()
    assert not run.background.buffers._free
