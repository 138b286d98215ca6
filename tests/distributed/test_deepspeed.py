"""DeepSpeed, where it is installed: `make test-deepspeed` has an environment of its own, because importing it changes torch."""

import os
import sys

import pytest

from distributed.conftest import SCRIPTS, done

pytest.importorskip("deepspeed")


def test_engines(launch):
    done = launch("several.py", "check_deepspeed.py", limit_s=600)
    assert done.stdout.count("\nok check_") == 7


def test_checkpoints(launch):
    done = launch("several.py", "check_deepspeed_checkpoints.py", limit_s=600)
    assert done.stdout.count("\nok check_") == 10


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_another_number_of_ranks_loads(launch, ranks):
    launch("several.py", "check_deepspeed_checkpoints.py", "saved_here", processes=ranks[0])
    launch("several.py", "check_deepspeed_checkpoints.py", "loaded_here", processes=ranks[1], limit_s=300)


@pytest.mark.slow
def test_killed_saves_leave_whole_checkpoints(tmp_path):
    command = [sys.executable, str(SCRIPTS / "deepspeed_killed.py"), str(tmp_path), "--kills", "10", "--seed", "0"]
    paths = os.pathsep.join(filter(None, [str(SCRIPTS.parents[1]), os.environ.get("PYTHONPATH")]))
    ended = done(command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}, timeout=600)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-8000:]
    assert ended.stdout.count(": 10 kills within saves") == 2, ended.stdout
