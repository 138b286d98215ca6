"""The configuration files of ``examples/configs/``: each is taken whole, and asks for what its name says."""

from pathlib import Path

import pytest

from accelerate.extensions.dry_run.text import show
from accelerate.launch import config_file
from accelerate.launch.resolve import resolve

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
# Processes of this machine, the runner, and variables that its workers have to get.
EXPECTED = {
    "laptop_cpu": (2, "local", {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}),
    "one_gpu_bf16": (1, "single", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "ddp_8_gpus": (8, "local", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "fsdp2": (
        8,
        "local",
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"},
    ),
    "hsdp_2_machines": (
        8,
        "machines",
        {"FSDP_VERSION": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"},
    ),
    "tensor_parallel": (8, "local", {"FSDP_VERSION": "2", "PARALLELISM_CONFIG_TP_SIZE": "4"}),
    "deepspeed_zero2": (8, "local", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
    "two_machines": (8, "machines", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
}


def test_all_of_them_are_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_configuration_is_taken_whole_and_asks_for_what_it_says(name, parse, gpus):
    if name != "laptop_cpu":
        gpus(1 if "one_gpu" in name else 8)
    path = CONFIGS / f"{name}.yaml"
    assert config_file.inspect(path).problems == []
    plan = resolve(parse(f"--config_file {path} --dry_run train.py"))
    processes, runner, variables = EXPECTED[name]
    text = show(plan)
    assert plan.runner == runner
    assert ("They meet at 10.0.0.1, port 29500" in text) is (runner == "machines")
    assert plan.num_processes // plan["num_machines"] == processes
    for variable, value in variables.items():
        assert f"{variable}={value}".lower() in text.lower(), text
