"""A device that torch knows by its own means alone: everything of one process holds on it. See `hosted`."""

import sys
from pathlib import Path

import pytest
import torch

from accelerate.utils.versions import is_torch_version
from distributed.conformance.checks import CHECKS
from distributed.conftest import SCRIPTS, done, plain_environment

UNIT = Path(__file__).parents[1] / "unit"
# Of the whole suite what differs between devices, and takes seconds.
QUICK = ("computes_in_bf16", "continues_after_loading")
ABOUT_DEVICES = [
    *(UNIT / name for name in ("devices", "training", "modules")),
    *(UNIT / f"test_{name}.py" for name in ("accelerator", "optimizer", "process", "state")),
    *(UNIT / name for name in ("comm/test_operations.py", "data/test_adapter.py", "precision/test_amp.py")),
    *(UNIT / name for name in ("runtime/test_random.py", "utils/test_memory.py")),
    *(UNIT.parent / "extensions" / name for name in ("big_models/test_placement.py", "vendor_devices")),
]
assert all(path.exists() for path in ABOUT_DEVICES), "a slow test alone would tell of one that has moved"
pytestmark = pytest.mark.skipif(
    is_torch_version("<", "2.10") or not hasattr(torch._C, "_acc"), reason="torch has no devices written in Python"
)


def run(tmp_path, *arguments):
    environment = plain_environment(tmp_path, TEST_DEVICE="hosted", OMP_NUM_THREADS="1")
    ended = done([sys.executable, *map(str, arguments)], cwd=UNIT.parents[1], env=environment, timeout=600)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([check for check in CHECKS if check not in QUICK], id="others", marks=pytest.mark.slow),
    ],
)
def test_every_check_of_one_process_passes(tmp_path, checks):
    told = run(tmp_path, SCRIPTS.parent / "conformance" / "run.py", tmp_path / "place", "single", *checks, "--pairs")
    assert {line.partition(" (")[0] for line in told.splitlines()} >= {f"ok single {check}" for check in checks}


@pytest.mark.slow
def test_the_unit_tests_about_devices_pass(tmp_path):
    """In a process in which the device is there, and found before all others."""
    marks = "not slow and not gpu"
    told = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *ABOUT_DEVICES)
    assert " passed" in told and "failed" not in told, told
