"""Positions in the data, in checkpoints of the peer's wheels and in ours."""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

FIXTURES = Path(__file__).parents[2] / "fixtures"
ROOT = FIXTURES.parents[1]
VERSIONS = ("1.12.0", "1.15.0")
STATEFUL = is_torchdata_stateful_dataloader_available()
needs_torchdata = pytest.mark.skipif(not STATEFUL, reason="needs torchdata's StatefulDataLoader")

specification = importlib.util.spec_from_file_location("peer_positions", FIXTURES / "peer_positions.py")
peer_positions = importlib.util.module_from_spec(specification)
specification.loader.exec_module(peer_positions)
prepared, AFTER = peer_positions.prepared, peer_positions.SAVED_BATCH


def values(loader):
    return [batch.tolist() for batch in loader]


@pytest.fixture(params=VERSIONS)
def saved(request, tmp_path):
    """A copy of a wheel's checkpoint, and the epochs of its run."""
    shutil.copytree(FIXTURES / f"accelerate-{request.param}", tmp_path / "checkpoint")
    return tmp_path / "checkpoint", json.loads((tmp_path / "checkpoint" / "truth.json").read_text())


def test_the_orders_are_those_of_the_wheels(saved):
    _, loader = prepared("seedable")
    assert [values(loader) for _ in range(3)] == saved[1]


def hints(accelerator, folder, caplog):
    """Load, and return what the log says about the epoch."""
    with caplog.at_level(logging.INFO, logger="accelerate.checkpoint"):
        accelerator.load_state(str(folder))
    return [record.message for record in caplog.records if "set_epoch" in record.message]


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
def test_a_stateful_loader_continues_where_the_wheel_was(saved, caplog):
    folder, epochs = saved
    accelerator, loader = prepared("stateful_seedable")
    (hint,) = hints(accelerator, folder, caplog)
    assert "only where it stood" in hint
    loader.set_epoch(1)
    assert [values(loader), values(loader)] == [epochs[1][AFTER:], epochs[2]]


@pytest.mark.parametrize("dl_state", ["kept", "none"])
def test_where_there_is_no_position_the_log_says_so(saved, caplog, dl_state):
    folder, epochs = saved
    if dl_state == "none":  # as the wheels leave it, except for stateful loaders
        (folder / "dl_state_dict.bin").unlink()
    accelerator, loader = prepared("seedable")
    (hint,) = hints(accelerator, folder, caplog)
    assert "skip_first_batches" in hint
    assert loader.iteration == 0 and loader.batches_yielded == 0
    # What the line says to do gives the rest of the run.
    loader.set_epoch(1)
    rest = values(accelerator.skip_first_batches(loader, AFTER))
    assert [rest, values(loader)] == [epochs[1][AFTER:], epochs[2]]


def test_our_own_checkpoints_need_no_such_line(tmp_path, caplog):
    accelerator, loader = prepared("seedable")
    list(loader)
    iterator = iter(loader)
    begun = [next(iterator).tolist(), next(iterator).tolist()]
    accelerator.save_state(str(tmp_path / "own"))
    rest = [batch.tolist() for batch in iterator]
    again, restored = prepared("seedable")
    assert hints(again, tmp_path / "own", caplog) == []
    assert restored.iteration == 1 and values(restored) == rest and begun[0] not in rest


@pytest.fixture(params=VERSIONS)
def wheel(request, tmp_path):
    """Run the script beside the fixtures with a wheel of the peer."""
    python = ROOT / f".venv-peer-{request.param}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs an environment with accelerate {request.param}: {python.parents[1]}")
    packages = tmp_path / "packages"
    packages.mkdir()
    if STATEFUL:  # pure Python, so the one that is installed here serves there too
        import torchdata

        for path in Path(torchdata.__file__).parents[1].glob("torchdata*"):
            (packages / path.name).symlink_to(path)

    def run(*arguments):
        command = [str(python), "-W", "ignore", str(FIXTURES / "peer_positions.py"), *map(str, arguments)]
        variables = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    run.version = request.param
    return run


KINDS = [kind for kind in peer_positions.KINDS if STATEFUL or "stateful" not in kind]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_the_wheels_write_is_what_the_fixtures_hold(wheel, tmp_path):
    wheel("write", tmp_path / "out", *KINDS)
    fixture = FIXTURES / f"accelerate-{wheel.version}"
    for kind in KINDS:
        names = {path.name for path in (tmp_path / "out" / kind).iterdir()}
        without = set() if "stateful" in kind else {"dl_state_dict.bin"}
        assert names == {path.name for path in fixture.iterdir()} - without, kind
        _, loader = prepared(kind)
        truth = json.loads((tmp_path / "out" / kind / "truth.json").read_text())
        assert [values(loader) for _ in range(3)] == truth, kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_continues_in_the_wheels(wheel, tmp_path, kind):
    """The order of a plain loader is in our files only; the wheels pass over that, and take what they know."""
    peer_positions.write(tmp_path / "out", kind)
    expected = json.loads((tmp_path / "out" / kind / "truth.json").read_text())[1][AFTER:]
    batches = json.loads(wheel("read", tmp_path / "out" / kind, kind).partition("batches:")[2])
    assert batches == expected if "seedable" in kind else len(batches) == len(expected)
