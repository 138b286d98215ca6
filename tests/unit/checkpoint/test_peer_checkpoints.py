"""Checkpoints pass both ways between this implementation and the wheels of upstream; those of our own last version load."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

ROOT = Path(__file__).parents[3]
FIXTURES, PEERS = ROOT / "tests" / "fixtures", ROOT / ".cache" / "peer"
sys.path.insert(0, str(FIXTURES))
import peer_checkpoints  # noqa: E402
import peer_positions  # noqa: E402

prepared, AFTER = peer_positions.prepared, peer_positions.SAVED_BATCH
STATEFUL = is_torchdata_stateful_dataloader_available()
each_version = pytest.mark.parametrize("version", ["1.12.0", "1.13.0", "1.14.0", "1.15.0"])


# `make test` fetches 1.15.0; `make PEER=.cache/peer/1.12.0 .cache/peer/1.12.0/.ready` another one, which is tried, too.
each_wheel = pytest.mark.parametrize("peer", sorted(path.name for path in PEERS.glob("1.*")))


def wheel(peer, script, *arguments):
    command = [sys.executable, "-W", "ignore", str(FIXTURES / script), *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(PEERS / peer), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@each_version
@pytest.mark.parametrize("kind", ["safe", "bin"])
def test_what_the_wheels_wrote_loads_here(version, kind, caplog):
    folder = FIXTURES / "checkpoints" / version
    assert peer_checkpoints.read(folder / kind) == json.loads((folder / "truth.json").read_text())
    assert "is loaded unverified" in caplog.text


@each_version
def test_weights_that_the_wheels_wrote_in_shards_load_here(version):
    folder = FIXTURES / "checkpoints" / version
    model = peer_checkpoints.Tied()
    load_checkpoint_in_model(model, folder / "weights")
    expected = json.loads((folder / "truth.json").read_text())["weights"][0]
    assert {name: value.tolist() for name, value in model.state_dict().items()} == expected


@pytest.mark.slow
@each_wheel
@pytest.mark.parametrize("kind", ["safe", "bin"])
def test_what_we_write_loads_in_the_wheel(tmp_path, kind, peer):
    peer_checkpoints.write(tmp_path)
    facts = wheel(peer, "peer_checkpoints.py", "read", tmp_path / kind).partition("facts:")[2]
    assert json.loads(facts) == json.loads((tmp_path / "truth.json").read_text())


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


def values(loader):
    return [batch.tolist() for batch in loader]


def hints(accelerator, folder, caplog):
    with caplog.at_level(logging.INFO, logger="accelerate.checkpoint"):
        accelerator.load_state(str(folder))
    return [record.message for record in caplog.records if "set_epoch" in record.message]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", ["1.12.0", "1.15.0"])
@pytest.mark.parametrize("kind", ["stateful_seedable", "seedable", "seedable, as the wheels leave it"])
def test_positions_that_the_wheels_wrote(tmp_path, caplog, version, kind):
    """A stateful loader continues; for another one the log says what gives the rest of the run."""
    if kind == "stateful_seedable" and not STATEFUL:
        pytest.skip("needs torchdata's StatefulDataLoader")
    folder = shutil.copytree(FIXTURES / f"accelerate-{version}", tmp_path / "checkpoint")
    epochs = json.loads((folder / "truth.json").read_text())
    kind, _, as_left = kind.partition(",")
    assert [values(loader) for loader in [prepared("seedable")[1]] * 3] == epochs
    if as_left:
        (folder / "dl_state_dict.bin").unlink()
    accelerator, loader = prepared(kind)
    (hint,) = hints(accelerator, folder, caplog)
    loader.set_epoch(1)
    if kind == "stateful_seedable":
        assert "only where it stood" in hint
        rest = values(loader)
    else:
        assert "skip_first_batches" in hint and loader.batches_yielded == 0
        rest = values(accelerator.skip_first_batches(loader, AFTER))
    assert [rest, values(loader)] == [epochs[1][AFTER:], epochs[2]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@each_wheel
@pytest.mark.parametrize("kind", [kind for kind in peer_positions.KINDS if STATEFUL or "stateful" not in kind])
def test_what_we_write_continues_in_the_wheel(tmp_path, kind, peer):
    """The order of a plain loader is in our files only; the wheel passes over that, and takes what it knows."""
    peer_positions.write(tmp_path, kind)
    expected = json.loads((tmp_path / kind / "truth.json").read_text())[1][AFTER:]
    batches = json.loads(wheel(peer, "peer_positions.py", "read", tmp_path / kind, kind).partition("batches:")[2])
    assert batches == expected if "seedable" in kind else len(batches) == len(expected)
