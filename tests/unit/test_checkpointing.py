"""Saving and loading given objects."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import checkpointing


def objects():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("safe", [True, False])
def test_there_and_back(tmp_path, safe):
    model, optimizer, scheduler = objects()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    saved = checkpointing.save_accelerator_state(
        str(tmp_path / "new"),
        [model.state_dict()],
        [optimizer],
        [scheduler],
        [DataLoader([1, 2], shuffle=True)],
        process_index=0,
        step=5,
        scaler=scaler,
        safe_serialization=safe,
    )
    assert saved == Path(tmp_path / "new")
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    assert set(os.listdir(saved)) == {weights, "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"}
    other_model, other_optimizer, other_scheduler = objects()
    other_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    overrides = checkpointing.load_accelerator_state(
        saved, [other_model], [other_optimizer], [other_scheduler], [DataLoader([1, 2])], 0, other_scaler, "on_device"
    )
    assert overrides == {"step": 5}
    assert torch.equal(other_model.weight, model.weight)
    assert other_optimizer.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert other_scaler.get_scale() == 4.0


def test_a_checkpoint_without_scaler_starts_the_scale_anew(tmp_path, caplog):
    checkpointing.save_accelerator_state(tmp_path, [], [], [], [], 0, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 0, scaler)
    assert scaler.get_scale() == 8.0 and "scaler.pt" in caplog.text


def test_a_rank_that_was_not_there_is_told(tmp_path, caplog):
    checkpointing.save_accelerator_state(tmp_path, [], [], [], [], 0, 5)
    assert checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 3) == {"step": 5}
    drawn = torch.rand(2)
    assert checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 3) == {"step": 5}
    assert torch.equal(torch.rand(2), drawn), "its numbers are derived from what the checkpoint has"
    checkpointing.load_accelerator_state(tmp_path, [], [], [], [], 4)
    assert not torch.equal(torch.rand(2), drawn)
    assert "random_states_3.pkl" in caplog.text and "fewer processes" in caplog.text
