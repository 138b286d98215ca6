"""`accelerate test` on real processes: it passes here, and a failure names the check and the ranks, and ends."""

import sys

import pytest

from distributed.conftest import done, lines_without_gloo, plain_environment


def test_the_self_check_passes_on_two_processes(tmp_path):
    (tmp_path / "c.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    variables = plain_environment(tmp_path, OMP_NUM_THREADS="1", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", "--config_file", "c.yaml"]
    ended = done(command, cwd=tmp_path, env=variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = lines_without_gloo(ended.stdout)
    assert lines[1].startswith("2 processes on cpu (gloo), MULTI_CPU, mixed precision bf16")
    progress = [line for line in lines if line.startswith("[")]
    count = len(progress)
    assert count > 10
    assert [line.partition("]")[0] for line in progress] == [f"[{n:2}/{count}" for n in range(1, count + 1)]
    assert all(" ... ok " in line for line in progress)
    assert lines[-2:] == ["All checks passed.", "The self check passed: this machine is ready to train."]


FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: {}\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
FSDP += "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
ZERO = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: {}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        FSDP.format(2),
        FSDP.format(1),
        "parallelism_config:\n  parallelism_config_tp_size: 2\n",
        ZERO.format(2),
        ZERO.format(3),
    ],
    ids=["fsdp2", "fsdp1", "tp", "deepspeed-2", "deepspeed-3"],
)
def test_the_self_check_passes_with_a_strategy_that_is_configured(tmp_path, strategy):
    """Layers, and accumulation, that the file names for the user's own program are omitted."""
    if "DEEPSPEED" in strategy:
        pytest.importorskip("deepspeed", exc_type=ImportError)
    (tmp_path / "c.yaml").write_text(f"num_processes: 2\nuse_cpu: true\n{strategy}")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", "--config_file", "c.yaml"]
    ended = done(command, cwd=tmp_path, env=plain_environment(tmp_path, OMP_NUM_THREADS="1"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "training ... skipped" not in ended.stdout and "The self check passed" in ended.stdout


@pytest.mark.parametrize(
    "broken", [(1,), *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in [(0,), (0, 1, 2)])]
)
def test_a_failure_names_the_check_and_the_rank(launch, broken):
    """Ranks that wait for the broken one in a collective do not keep the run."""
    ended = launch("failing_checks.py", *map(str, broken), processes=3, succeeds=False)
    assert ended.returncode == 1
    assert "[1/3] first ... ok" in ended.stdout
    assert "second ... ok" not in ended.stdout and "[3/3]" not in ended.stdout
    told = [f"The check 'second' failed on rank {rank} of 3: ValueError: rank {rank} is broken" for rank in broken]
    assert any(line in ended.stderr for line in told)
