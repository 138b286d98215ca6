"""Every strategy against one process: one launch for each number of processes, with a line for each strategy and check.

A new strategy joins by its name in `conformance/strategies.py`.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from distributed.conformance.checks import CHECKS
from distributed.conformance.strategies import STRATEGIES
from distributed.conftest import SCRIPTS, done, launch_command, plain_environment

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
    # Torch keeps the groups of every mesh until a process ends, and each has threads, which after hundreds of groups are all that runs.
    at_once = 3 if slow else len(chosen)
    for first in range(0, len(chosen), at_once):
        some = chosen[first : first + at_once]
        expected = {f"ok {one.name} {check}" for one in some for check in CHECKS if check not in one.without}
        arguments = [str(tmp_path / "checkpoints"), *(one.name for one in some), "--pairs"]
        if (processes, slow, needs) == (2, False, ""):
            arguments += EXCHANGE
            expected |= {f"ok {source} saves" for source in EXCHANGE}
            expected |= {f"ok {goal} loads {source}" for source in EXCHANGE for goal in EXCHANGE}
        paths = [str(third_party), *filter(None, [os.environ.get("PYTHONPATH")])]
        how = {"processes": processes, "cpu": True, "limit_s": 600}
        done = launch(str(FOLDER / "run.py"), *arguments, **how, environment={"PYTHONPATH": os.pathsep.join(paths)})
        held = {line.partition(" (")[0] for line in done.stdout.splitlines()}
        assert expected <= held, f"{sorted(expected - held)} did not run:\n{done.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "needs"),
    [
        pytest.param(*launch, id=f"{launch[0]}{launch[1] and '-'}{launch[1]}")
        for launch in sorted({(count, needs) for count, _, needs in LAUNCHES})
    ],
)
def test_a_simulated_rank_does_what_the_rank_of_a_real_run_does(tmp_path, third_party, processes, needs):
    """Under each strategy: collectives of each step with their bytes, shapes of parameters, batches, samples that are read."""
    if needs:
        pytest.importorskip(needs)
    names = [one.name for one in STRATEGIES.values() if processes in one.processes and one.needs == needs]
    paths = os.pathsep.join([str(third_party), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = plain_environment(tmp_path, OMP_NUM_THREADS="1", PYTHONPATH=paths)
    real = launch_command(processes, cpu=True)
    simulated = [*real[:-3], "--simulate", f"1x{processes}", "--simulate_rank", str(processes - 1)]
    found = []
    for command in (real, simulated):
        ended = done([*command, str(SCRIPTS / "check_simulated.py"), *names], cwd=tmp_path, env=environment)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        lines = [line.split(" ", 2) for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
        found.append({name: json.loads(what) for _, name, what in lines})
    assert found[0].keys() == set(names) and all(len(each["calls"]) == 2 for each in found[0].values())
    assert found[1] == found[0]


def test_a_third_party_is_launched_by_its_switch_and_listed(tmp_path, third_party):
    variables = {
        **plain_environment(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(third_party), str(SCRIPTS.parents[1])]),
    }
    command = [*launch_command(2, cpu=True), "--use_averaging", str(SCRIPTS / "third_party_run.py")]
    ended = done(command, env=variables, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("averaging resumed") == 1, ended.stdout
    listed = done([sys.executable, "-m", "accelerate.commands.accelerate_cli", "env"], env=variables, cwd=tmp_path)
    assert "- averaging: averaging:Averaging" in listed.stdout, listed.stdout + listed.stderr


def test_a_broken_third_party_does_not_keep_others_from_starting(tmp_path, third_party):
    (third_party / "averaging.py").write_text("import package_that_is_missing\n")
    variables = {**plain_environment(tmp_path), "PYTHONPATH": str(third_party)}
    (tmp_path / "script.py").write_text("print('started')\n")
    ended = done([*launch_command(1, cpu=True), "script.py"], env=variables, cwd=tmp_path)
    assert ended.stdout == "started\n", ended.stderr
    assert "package_that_is_missing" in ended.stderr and "averaging" in ended.stderr
