"""torch_xla on the processor: one device, and two virtual ones of one process (SPMD). `make test-xla`, in a separate environment."""

import importlib.util
import sys

import pytest

from distributed.conformance.checks import CHECKS
from distributed.conftest import SCRIPTS, done, plain_environment

if importlib.util.find_spec("torch_xla") is None:
    pytest.skip(
        "torch_xla is not installed; `make test-xla` makes an environment that has it", allow_module_level=True
    )

RUN = SCRIPTS.parent / "conformance" / "run.py"
# Each has graphs of its own to compile, which takes most of the time.
SPREAD = ("equals_one_process", "computes_in_bf16", "continues_after_loading", "gathers_each_sample_once")


def run(tmp_path, *arguments, devices=None):
    environment = plain_environment(tmp_path, TEST_DEVICE="xla", PJRT_DEVICE="CPU", PYTHONWARNINGS="ignore")
    if devices:
        environment["CPU_NUM_DEVICES"] = str(devices)
    ended = done([sys.executable, *map(str, arguments)], cwd=tmp_path, env=environment, timeout=900)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-3000:]
    return {line.partition(" (")[0] for line in ended.stdout.splitlines()}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("devices", "checks"), [(None, tuple(CHECKS)), (2, SPREAD)], ids=["one", "two"])
def test_every_check_of_one_process_passes(tmp_path, devices, checks):
    held = run(tmp_path, RUN, tmp_path / "checkpoints", "single", *checks, "--pairs", devices=devices)
    assert held >= {f"ok single {check}" for check in checks}


@pytest.mark.timeout(1000)
def test_fsdp_v2_over_two_devices(tmp_path):
    assert run(tmp_path, SCRIPTS / "check_xla.py", tmp_path, devices=2) >= {"ok check_who_follows", "ok check_sharded"}
