"""DeepSpeed, where it is installed: `make test-deepspeed` has a separate environment, because importing it changes torch."""

import os
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import _get_build_directory

from accelerate.utils.other import get_free_port
from distributed.conftest import LAUNCH_ON_CPU, SCRIPTS, done

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("part", ["deepspeed", "deepspeed_more", "deepspeed_checkpoints", "ulysses"])
def test_checks(launch, part):
    if part == "ulysses":
        pytest.importorskip("transformers")
    launch("several.py", f"check_{part}.py", limit_s=600)


@pytest.mark.slow
def test_offload_to_nvme_and_compiled_adam(launch):
    missing = {
        name: builder
        for name, builder in (("async_io", "AsyncIOBuilder"), ("cpu_adam", "CPUAdamBuilder"))
        if not Path(_get_build_directory(name, verbose=False), f"{name}.so").exists()
    }
    if missing:
        load = "; ".join(f"b.{builder}().load()" for builder in missing.values())
        pytest.skip(
            f"DeepSpeed has not compiled {', '.join(missing)}. It takes minutes, and async_io needs libaio's headers (libaio-dev): "
            f"python -c 'from deepspeed.ops import op_builder as b; {load}'"
        )
    launch("several.py", "check_deepspeed_built.py", limit_s=600)


@pytest.mark.parametrize(
    ("stage", "command"),
    [
        (2, [*LAUNCH_ON_CPU[:-1], "--config_file", "answers.yaml"]),
        (1, [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT"]),
        # On the CPU a slot is a core; these are two processes even where there are more.
        (2, ["deepspeed", "--num_gpus", "2", "--no_local_rank", "--master_port", "PORT"]),
        (3, [sys.executable]),  # notebook_launcher
    ],
)
def test_launchers(tmp_path, stage, command):
    own = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage), "DS_ACCELERATOR": "cpu"}
    own = own if "PORT" in command else {}
    command = [str(get_free_port()) if word == "PORT" else word for word in command]
    words = [str(stage), *(["notebook"] if len(command) == 1 else [])]
    if (
        "answers.yaml" in command
    ):  # machines of your own, CPU processes, one machine, DeepSpeed, and Enter for the rest
        interview = [word if word != "launch" else "config" for word in command]
        done(interview, input="\n".join(["1", "2", "", "3", *[""] * 20]), cwd=tmp_path)
    variables = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", **own}
    ended = done([*command, str(SCRIPTS / "deepspeed_run.py"), *words], env=variables, cwd=tmp_path)
    assert ended.returncode == 0 and ended.stdout.count("trained by an engine") == 1, ended.stdout + ended.stderr


def test_shared_sequences_beside_data_parallelism(launch):
    pytest.importorskip("transformers")
    launch("several.py", "check_ulysses.py", "check_each_stage", processes=4, limit_s=600)


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
