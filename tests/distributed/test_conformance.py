"""Every strategy against one process: one launch for each number of processes, one test for each strategy and check.

A new strategy joins by its name in `conformance/strategies.py`.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from distributed.conformance.checks import CHECKS
from distributed.conformance.strategies import STRATEGIES, Strategy
from distributed.conftest import launch_command

FOLDER = Path(__file__).parent / "conformance"
LIMIT_S = 600
# Between which checkpoints are exchanged, both ways.
EXCHANGE = ("ddp", "fsdp1-full_shard", "fsdp2", "tp")


def is_slow(strategy: Strategy, processes: int) -> bool:
    return processes in strategy.slow


@dataclass(frozen=True)
class Launch:
    """What one launch told.

    Attributes:
        findings: for each strategy and check what was wrong; a check that did not run is not there.
        status: the exit status.
        output: its last words.
    """

    findings: dict[tuple[str, str], list[str]]
    status: int
    output: str

    def require(self, strategy: str, check: str) -> None:
        """Fail with what was found, or with the launch's last words if it did not come to this check."""
        found = self.findings.get((strategy, check))
        assert found is not None, f"{strategy}: {check} did not run (exit status {self.status}):\n{self.output}"
        assert not found, "\n".join([f"{strategy}: {check}:", *found])
        everything_held = not any(self.findings.values())
        assert (self.status == 0) is everything_held, f"exit status {self.status}:\n{self.output}"


def install(folder: Path) -> None:
    """Put the third party's strategy into a folder as pip does: a module, and a distribution that has an entry point."""
    shutil.copy(FOLDER / "averaging.py", folder / "averaging.py")
    metadata = folder / "averaging-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: averaging\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[accelerate.backends]\naveraging = averaging:SPEC\n")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process of the tests in at a time."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def launch(processes: int, slow: bool, place: Path) -> dict:
    """Launch all strategies of a number of processes, and return what `Launch` takes."""
    place.mkdir()
    install(place)
    told = place / "findings.jsonl"
    names = [one.name for one in STRATEGIES.values() if processes in one.processes and is_slow(one, processes) is slow]
    words = ["--checks", *names, *(["--pairs", *EXCHANGE] if (processes, slow) == (2, False) else [])]
    command = [*launch_command(processes, cpu=True), str(FOLDER / "run.py"), str(told), *words]
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=variables, cwd=place, capture_output=True, text=True, timeout=LIMIT_S)
    lines = told.read_text("utf-8").splitlines() if told.exists() else []
    return {
        "findings": [json.loads(line) for line in lines],
        "status": done.returncode,
        "output": f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}",
    }


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Callable[..., Launch]:
    """Return a function that launches once for each number of processes, fast or slow, whoever of several workers asks."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    @cache
    def run(processes: int, slow: bool) -> Launch:
        place = root / f"conformance-{processes}-{'slow' if slow else 'fast'}"
        outcome = place.with_suffix(".json")
        with alone(place.with_suffix(".lock")):
            if not outcome.exists():
                outcome.write_text(json.dumps(launch(processes, slow, place)))
        told = json.loads(outcome.read_text())
        findings = {(line["strategy"], line["check"]): line["wrong"] for line in told["findings"]}
        return Launch(findings, told["status"], told["output"])

    return run


def cases() -> list:
    """Return every strategy, number of processes and check."""
    found = []
    for strategy in STRATEGIES.values():
        for processes in strategy.processes:
            marks = [pytest.mark.slow] if is_slow(strategy, processes) else []
            found += [
                pytest.param(strategy, processes, check, marks=marks, id=f"{strategy.name}-{processes}-{check}")
                for check in CHECKS
                if check not in strategy.without
            ]
    return found


@pytest.mark.parametrize(("strategy", "processes", "check"), cases())
def test_strategy(launched, strategy, processes, check):
    launched(processes, is_slow(strategy, processes)).require(strategy.name, check)


@pytest.mark.parametrize("goal", EXCHANGE)
@pytest.mark.parametrize("source", EXCHANGE)
def test_checkpoint_of_another_strategy(launched, source, goal):
    done = launched(2, False)
    done.require(source, "saves")
    done.require(goal, f"loads {source}")


def test_what_does_not_apply_has_a_reason():
    for strategy in STRATEGIES.values():
        assert set(strategy.without) <= set(CHECKS) and all(strategy.without.values()), strategy.name
