"""Checkpoints pass both ways between this implementation and the wheels of upstream from 1.12.0 to 1.15.0; those of our own last version load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate import Accelerator, load_checkpoint_in_model

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
VERSIONS = sorted(path.name for path in (FIXTURES / "checkpoints").iterdir())
sys.path.insert(0, str(FIXTURES))
import peer_checkpoints  # noqa: E402


def test_the_versions():
    assert VERSIONS == ["1.12.0", "1.13.0", "1.14.0", "1.15.0"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["safe", "bin"])
def test_what_the_wheels_wrote_loads_here(version, kind, caplog):
    folder = FIXTURES / "checkpoints" / version
    assert peer_checkpoints.read(folder / kind) == json.loads((folder / "truth.json").read_text())
    assert "is loaded unverified" in caplog.text


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_that_the_wheels_wrote_in_shards_load_here(version):
    folder = FIXTURES / "checkpoints" / version
    model = peer_checkpoints.Tied()
    load_checkpoint_in_model(model, folder / "weights")
    expected = json.loads((folder / "truth.json").read_text())["weights"][0]
    assert {name: value.tolist() for name, value in model.state_dict().items()} == expected


def test_weights_that_we_write_in_shards_load_here(tmp_path):
    for safe in (True, False):
        job = peer_checkpoints.Job(seed=3)
        job.accelerator.save_model(job.first, tmp_path / f"{safe}", max_shard_size=50, safe_serialization=safe)
        model = peer_checkpoints.Tied()
        load_checkpoint_in_model(model, tmp_path / f"{safe}")
        assert torch.equal(model.inside.weight, job.first.inside.weight) and len(os.listdir(tmp_path / f"{safe}")) > 2


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_what_we_write_loads_in_the_wheels(tmp_path, version):
    python = ROOT / f".venv-peer-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs an environment with accelerate {version}: {python.parents[1]}")
    peer_checkpoints.write(tmp_path)
    truth = json.loads((tmp_path / "truth.json").read_text())
    for kind in ("safe", "bin"):
        command = [str(python), "-W", "ignore", str(FIXTURES / "peer_checkpoints.py"), "read", str(tmp_path / kind)]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.partition("facts:")[2]) == truth, kind


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_what_our_last_version_wrote_loads_here(kind):
    """On two ranks, whole under DDP and sharded under FSDP2."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=2, shuffle=True)
    accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.load_state(FIXTURES / "last_version" / kind)
    expected = load_file(FIXTURES / "last_version" / "whole" / "model.safetensors")
    torch.testing.assert_close(dict(model.state_dict()), expected)  # both runs trained on the same samples
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.025
    assert {float(kept["step"]) for kept in state["state"].values()} == {2.0}
    assert all(kept["exp_avg"].abs().max() > 0 for kept in state["state"].values())
