"""Every strategy against one process: one launch for each number of processes, with a line for each strategy and check.

A new strategy joins by its name in `conformance/strategies.py`.
"""

import os
import shutil
from pathlib import Path

import pytest

from distributed.conformance.checks import CHECKS
from distributed.conformance.strategies import STRATEGIES

FOLDER = Path(__file__).parent / "conformance"
# Between which checkpoints are exchanged, both ways.
EXCHANGE = tuple(name for name in ("ddp", "fsdp1-full_shard", "fsdp2", "tp") if name in STRATEGIES)
LAUNCHES = sorted({(count, count in one.slow, one.needs) for one in STRATEGIES.values() for count in one.processes})


@pytest.fixture
def third_party(tmp_path):
    """Put the third party's strategy into a folder as pip does: a module, and a distribution that has an entry point."""
    folder = tmp_path / "site"
    metadata = folder / "averaging-0.1.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(FOLDER / "averaging.py", folder / "averaging.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: averaging\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[accelerate.backends]\naveraging = averaging:SPEC\n")
    return folder


@pytest.mark.parametrize(
    ("processes", "slow", "needs"),
    [
        pytest.param(
            *launch,
            marks=[pytest.mark.slow] * launch[1],
            id=f"{launch[0]}{'-slow' * launch[1]}{launch[2] and '-'}{launch[2]}",
        )
        for launch in LAUNCHES
    ],
)
def test_strategies(launch, tmp_path, third_party, processes, slow, needs):
    if needs:
        pytest.importorskip(needs)
    chosen = [
        one
        for one in STRATEGIES.values()
        if processes in one.processes and (processes in one.slow, one.needs) == (slow, needs)
    ]
    expected = {f"ok {one.name} {check}" for one in chosen for check in CHECKS if check not in one.without}
    arguments = [str(tmp_path / "checkpoints"), *(one.name for one in chosen), "--pairs"]
    if (processes, slow, needs) == (2, False, ""):
        arguments += EXCHANGE
        expected |= {f"ok {source} saves" for source in EXCHANGE}
        expected |= {f"ok {goal} loads {source}" for source in EXCHANGE for goal in EXCHANGE}
    paths = [str(third_party), *filter(None, [os.environ.get("PYTHONPATH")])]
    how = {"processes": processes, "cpu": True, "limit_s": 600}
    done = launch(str(FOLDER / "run.py"), *arguments, **how, environment={"PYTHONPATH": os.pathsep.join(paths)})
    held = {line.partition(" (")[0] for line in done.stdout.splitlines()}
    assert expected <= held, f"{sorted(expected - held)} did not run:\n{done.stdout}"
