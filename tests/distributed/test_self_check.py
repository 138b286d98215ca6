"""`accelerate test` on real processes: it passes here, and a failure names the check and the ranks, and ends."""

import os
import subprocess
import sys

import pytest


def test_the_self_check_passes_on_two_processes(tmp_path):
    (tmp_path / "c.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", "--config_file", "c.yaml"],
        cwd=tmp_path,
        env={**kept, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("2 processes on cpu (gloo), MULTI_CPU, mixed precision bf16")
    progress = [line for line in lines if line.startswith("[")]
    count = len(progress)
    assert count > 12
    assert [line.partition("]")[0] for line in progress] == [f"[{n:2}/{count}" for n in range(1, count + 1)]
    assert all(" ... ok " in line for line in progress)
    assert lines[-2:] == ["All checks passed.", "The self check passed: this machine is ready to train."]


@pytest.mark.parametrize(
    "broken", [(1,), *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in [(0,), (0, 1, 2)])]
)
def test_a_failure_names_the_check_and_the_rank(launch, broken):
    """Ranks that wait for the broken one in a collective do not keep the run."""
    done = launch("failing_checks.py", *map(str, broken), processes=3, succeeds=False)
    assert done.returncode == 1
    assert "[1/3] first ... ok" in done.stdout
    assert "second ... ok" not in done.stdout and "[3/3]" not in done.stdout
    told = [f"The check 'second' failed on rank {rank} of 3: ValueError: rank {rank} is broken" for rank in broken]
    assert any(line in done.stderr for line in told)
