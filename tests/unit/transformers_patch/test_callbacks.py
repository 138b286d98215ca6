"""Code that changes the folder of a Trainer's checkpoint: `on_save` of callbacks, subclasses, a project's own rotation."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers.trainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import transformers_patch
from transformers_patch.checkpoints import CheckpointMixin, choose


class Own(CheckpointMixin, Trainer):
    pass


class OnSave(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_save(self, args, state, control, **rest):
        self.act(Path(args.output_dir, f"checkpoint-{state.global_step}"))


def train(folder, callbacks=(), kind=Own, checkpoints=True, **options):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    rows = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}] * 4
    options = {"use_cpu": True, "report_to": [], "max_steps": 2, "save_steps": 1, "disable_tqdm": True} | options
    trainer = kind(model, TrainingArguments(str(folder), **options), train_dataset=rows, callbacks=list(callbacks))
    if kind is not Trainer:
        trainer.checkpoints = checkpoints
    trainer.train()
    return trainer


@pytest.mark.parametrize("checkpoints", [True, "async"])
def test_callbacks_may_change_move_and_resolve_the_folder(checkpoints, tmp_path):
    resolved = []

    def change(path):
        resolved.append(path.resolve())
        (path / "optimizer.pt").unlink()
        (path / "config.json").write_text("{}", "utf-8")
        (path / "optimizer.bin").touch()  # a reader would take it for the optimizer
        (path / "added.txt").write_text("x", "utf-8")
        os.mkfifo(path / "pipe")

    train(tmp_path / "changed", [OnSave(change)], checkpoints=checkpoints)
    assert [path.name for path in resolved] == ["checkpoint-1", "checkpoint-2"]
    assert all(path.is_dir() and choose.flaw(path, deep=True) == "" for path in resolved)
    (resolved[1] / "added.txt").write_text("yy", "utf-8")  # the user's own
    assert choose.flaw(resolved[1], deep=True) == ""
    (resolved[1] / "config.json").write_text("{ }", "utf-8")
    assert "config.json" in choose.flaw(resolved[1])

    def rename(path):
        path.rename(path.parent / f"best-{path.name}")

    train(tmp_path / "moved", [OnSave(rename)], checkpoints=checkpoints)
    assert sorted(os.listdir(tmp_path / "moved")) == ["best-checkpoint-1", "best-checkpoint-2"]
    train(tmp_path / "removed", [OnSave(shutil.rmtree)], checkpoints=checkpoints, save_total_limit=1)
    assert os.listdir(tmp_path / "removed") == []


def test_a_file_that_is_rewritten_after_on_save_belongs_to_the_checkpoint(tmp_path):
    """As by a thread that a callback started."""

    class Later(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            for path in tmp_path.glob("checkpoint-*/config.json"):
                path.write_text(f"[{state.global_step}]", "utf-8")

        on_train_end = on_step_end

    train(tmp_path, [Later()])
    assert [choose.flaw(tmp_path / f"checkpoint-{step}", deep=True) for step in (1, 2)] == ["", ""]
    assert (tmp_path / "checkpoint-2" / "config.json").read_text("utf-8") == "[2]"


class After(Trainer):
    """Writes into the checkpoint by its final path, and keeps the paths."""

    def _save_checkpoint(self, *args, **options):
        super()._save_checkpoint(*args, **options)
        for folder in (self.args.output_dir, self._get_output_dir(trial=None)):
            path = Path(folder, f"checkpoint-{self.state.global_step}").resolve()
            (path / "mine.txt").write_text("x", "utf-8")
            vars(self).setdefault("paths", []).append(path)


class Behind(CheckpointMixin, After):
    pass


class Before(After, CheckpointMixin, Trainer):
    pass


@pytest.mark.parametrize("checkpoints", [True, "async"])
@pytest.mark.parametrize("kind", [After, Behind, Before])
def test_a_subclass_writes_after_the_trainers_own_save(kind, checkpoints, tmp_path):
    if kind is After:
        transformers_patch.apply(checkpoints=checkpoints)
    trainer = train(tmp_path, kind=kind, checkpoints=checkpoints)
    assert {path.name for path in trainer.paths} == {"checkpoint-1", "checkpoint-2"}
    assert all((path / "mine.txt").is_file() and choose.flaw(path, deep=True) == "" for path in trainer.paths)
    assert all((path / "accelerate_manifest.json").is_file() for path in trainer.paths)


@pytest.mark.parametrize("checkpoints", [True, "async"])
def test_a_projects_own_rotation_gets_the_output_folder(checkpoints, tmp_path, monkeypatch):
    calls = []

    def rotate_checkpoints(*args, **options):
        folder = options.get("output_dir") or args[0]
        calls.append((folder, sorted(os.listdir(folder))))

    if not hasattr(transformers.trainer, "rotate_checkpoints"):
        pytest.skip("this release of transformers has no such function")
    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", rotate_checkpoints)
    train(tmp_path, checkpoints=checkpoints, save_total_limit=1)
    assert calls == [(str(tmp_path), ["checkpoint-1"]), (str(tmp_path), ["checkpoint-1", "checkpoint-2"])]
