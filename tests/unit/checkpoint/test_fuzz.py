"""Damaged checkpoints: each one is refused by an error that names the file, runs nothing, and changes nothing."""

import logging
import os
import pickle
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.data import resume
from unit.checkpoint import damage

SEED = int(os.environ.get("FUZZ_SEED", "0"))
REFUSALS = (DamagedCheckpoint, ValueError, RuntimeError, OSError, pickle.UnpicklingError)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="makes pipes and links")


class Notes:
    def __init__(self) -> None:
        self.step, self.data = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.data = state["step"], state["data"]


class Bench:
    """A run with three whole checkpoints of several steps, which then tries to load what was damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker = folder, folder / "executed"
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = DataLoader(torch.randn(40, 6), batch_size=4, shuffle=True)
        made = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = made
        self.notes = Notes()
        self.accelerator.register_for_checkpointing(self.notes)
        self.batches: Iterator[torch.Tensor] = iter(self.loader)
        self.expected = {}
        for name, safe in (("safe", True), ("unsafe", False), ("other", True)):
            self.train(1)
            self.accelerator.save_state(folder / name, safe_serialization=safe)
        for name in ("safe", "unsafe", "other"):
            self.accelerator.load_state(folder / name)
            self.expected[name] = self.everything()
        self.train(1)

    def train(self, steps: int) -> None:
        for batch in (next(self.batches) for _ in range(steps)):
            self.accelerator.backward(self.model(batch).square().mean() + random.random() + np.random.rand())
            self.optimizer.step(), self.scheduler.step(), self.optimizer.zero_grad()
            self.notes.step, self.notes.data = self.notes.step + 1, torch.rand(3)

    def everything(self) -> Any:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler", "notes")}
        return plain(
            {
                **parts,
                "generators": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
                "loader": resume.capture(self.loader),
                "counts": (self.accelerator.step, self.accelerator.save_iteration),
                "loaded": self.accelerator.__dict__.get("_loaded_checkpoint"),
            }
        )

    def attempt(self, number: int) -> None:
        draw = random.Random(f"{SEED} {number}")
        hurt, outcome = damage.KINDS[number % len(damage.KINDS)]
        base = "unsafe" if hurt is damage.hostile_pickle and draw.random() < 0.5 else "safe"
        folder = self.folder / "trials" / str(number) / "checkpoint"
        shutil.copytree(self.folder / base, folder)
        site = damage.Site(draw, folder, self.folder / "other", self.marker)
        outcome = hurt(site) or outcome
        before = self.everything()
        about = f"seed {SEED}, attempt {number}: {hurt.__name__} {site.names}"
        try:
            self.accelerator.load_state(folder)
        except Exception as error:
            assert outcome != damage.ACCEPTED, f"{about}: refused\n{error!r}"
            assert isinstance(error, REFUSALS), f"{about}: {type(error)}"
            named = site.names if outcome == damage.REFUSED and site.names else [*site.names, str(folder)]
            assert any(name in str(error) for name in named), f"{about}: not named\n{error!r}"
            assert self.everything() == before, f"{about}: something was changed"
        else:
            assert outcome != damage.REFUSED, f"{about}: accepted"
            after = {**self.everything(), "loaded": self.expected[base]["loaded"]}
            if site.names[:1] != [damage.RANDOM]:  # each of what it has is restored if it can be
                wrong = [name for name, value in after.items() if value != self.expected[base][name]]
                assert not wrong, f"{about}: accepted, with another {wrong}"
            self.accelerator.load_state(self.folder / "other")
        assert not self.marker.exists(), f"{about}: code was executed"
        shutil.rmtree(folder.parent)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), plain(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()), value.shape
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("attempts", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path, caplog, attempts):
    caplog.set_level(logging.CRITICAL)
    bench = Bench(tmp_path)
    for number in range(attempts):
        bench.attempt(number)
