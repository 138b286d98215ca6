"""Callbacks of transformers' Trainer that change the folder of the checkpoint in `on_save`."""

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from transformers_patch.checkpoints import CheckpointMixin, choose

pytestmark = pytest.mark.interop


class Patched(CheckpointMixin, Trainer):
    pass


def train(folder, act, checkpoints):
    class OnSave(TrainerCallback):
        def on_save(self, args, state, control, **rest):
            act(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    rows = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}] * 4
    options = {"use_cpu": True, "report_to": [], "max_steps": 2, "save_steps": 1, "disable_tqdm": True}
    trainer = Patched(model, TrainingArguments(str(folder), **options), train_dataset=rows, callbacks=[OnSave()])
    trainer.checkpoints = checkpoints
    trainer.train()


@pytest.mark.parametrize("checkpoints", [True, "async"])
def test_callbacks_may_change_move_and_resolve_the_folder(checkpoints, tmp_path):
    resolved = []

    def change(path):
        resolved.append(Path(path).resolve())
        os.remove(os.path.join(path, "optimizer.pt"))
        Path(path, "added.txt").write_text("x", "utf-8")

    train(tmp_path / "changed", change, checkpoints)
    assert [path.name for path in resolved] == ["checkpoint-1", "checkpoint-2"]
    assert all(path.is_dir() and choose.flaw(path, deep=True) == "" for path in resolved)
    (resolved[1] / "added.txt").write_text("yy", "utf-8")
    assert "added.txt" in choose.flaw(resolved[1])

    train(tmp_path / "moved", lambda path: os.rename(path, path.replace("checkpoint-", "best-")), checkpoints)
    assert sorted(os.listdir(tmp_path / "moved")) == ["best-1", "best-2"]
    train(tmp_path / "removed", shutil.rmtree, checkpoints)
    assert os.listdir(tmp_path / "removed") == []
