"""Comparisons of configuration files: what is read, written, updated and asked."""

import argparse
import builtins
import json
from pathlib import Path
from unittest import mock

import yaml

from accelerate.commands.config import cluster, config_args, default, sagemaker, update
from accelerate.commands.config import config as config_command
from interop.differential.core import probe, words
from interop.differential.probes.launching import listed

HEAD = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "NO", "mixed_precision": "no",
    "use_cpu": False,
}  # fmt: skip
AMAZON = {
    **HEAD, "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL",
    "ec2_instance_type": "ml.p3.2xlarge", "iam_role_name": "role",
}  # fmt: skip
KINDS = listed(
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_XPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_HPU XLA TPU DEEPSPEED FSDP MEGATRON_LM TP"
)
CONTENTS = {
    "head": HEAD,
    "amazon": AMAZON,
    **{f"kind {kind}": {**HEAD, "distributed_type": kind} for kind in [*KINDS, "no", "multi_gpu", "what", "", None, 0, False]},
    **{f"precision {word}": {**HEAD, "mixed_precision": word} for word in ["fp16", "bf16", "fp8", "FP16", "what", "", None, False]},
    **{f"cpu {word!r}": {**HEAD, "use_cpu": word} for word in [True, "yes", "true", None]},
    **{f"environment {word!r}": {**HEAD, "compute_environment": word} for word in ["local_machine", "what", None, ""]},
    **{f"processes {value!r}": {**HEAD, "num_processes": value} for value in [1, 2, 0, -1, "2", "x", None, 1.0, True]},
    **{f"machines {value!r}": {**HEAD, "num_machines": value} for value in [1, 2, 0, "2", None]},
    **{f"without {key}": {k: v for k, v in HEAD.items() if k != key} for key in HEAD},
    **{f"amazon without {key}": {k: v for k, v in AMAZON.items() if k != key} for key in AMAZON},
    **{f"amazon kind {kind}": {**AMAZON, "distributed_type": kind} for kind in ["NO", "MODEL_PARALLEL", "MULTI_GPU", "what"]},
    "amazon more": {**AMAZON, "profile": "p", "region": "eu-west-1", "num_machines": 2, "image_uri": "i", "additional_args": {"a": 1}, "py_version": "py310"},
    "dynamo": {**HEAD, "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}},
    "dynamo short": {**HEAD, "dynamo_config": {"backend": "INDUCTOR"}},
    "old dynamo": {**HEAD, "dynamo_backend": "EAGER"},
    "old dynamo no": {**HEAD, "dynamo_backend": "NO"},
    "old fp16": {**{k: v for k, v in HEAD.items() if k != "mixed_precision"}, "fp16": True},
    "old fp16 off": {**{k: v for k, v in HEAD.items() if k != "mixed_precision"}, "fp16": False},
    "fsdp": {**HEAD, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
    "fsdp one": {**HEAD, "distributed_type": "FSDP", "num_processes": 1, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False}},
    "fsdp none": {**HEAD, "distributed_type": "FSDP", "fsdp_config": None},
    "deepspeed": {**HEAD, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
    "megatron": {**HEAD, "distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
    "parallelism": {**HEAD, "parallelism_config": {"parallelism_config_tp_size": 2}},
    "fp8": {**HEAD, "mixed_precision": "fp8", "fp8_config": {"backend": "TE", "fp8_format": "E4M3"}},
    "mpirun": {**HEAD, "mpirun_config": {"mpirun_hostfile": "h", "mpirun_ccl": "1"}},
    "tpu": {**HEAD, "distributed_type": "XLA", "tpu_name": "n", "tpu_zone": "z", "tpu_use_cluster": True, "tpu_use_sudo": True, "tpu_env": ["A=1"], "tpu_vm": ["v"]},
    "network": {**HEAD, "main_process_ip": "h", "main_process_port": 1, "machine_rank": 0, "rdzv_backend": "c10d", "same_network": True},
    "misc": {**HEAD, "gpu_ids": "0,1", "main_training_function": "f", "downcast_bf16": True, "enable_cpu_affinity": True, "commands": ["a"], "command_file": "c"},
    "unknown": {**HEAD, "colour": "red"},
    "two unknown": {**HEAD, "colour": "red", "taste": 1},
    "empty": {},
}  # fmt: skip
TEXTS = {
    "nothing": "", "comment": "# x\n", "list": "- 1\n", "number": "3", "broken": "a: [1", "tab": "a:\t1\n\tb: 2\n",
    "text": "hello", "null": "null", "binary": "\0\1",
}  # fmt: skip


def write(name, ending="yaml"):
    path = f"file.{ending}"
    text = TEXTS.get(name)
    if text is None:
        text = json.dumps(CONTENTS[name]) if ending == "json" else yaml.safe_dump(CONTENTS[name])
    Path(path).write_text(text)
    return path


def described(config):
    return {"class": type(config).__name__, **dict(sorted(vars(config).items()))}


COVERED = [
    "commands.config.config_args:load_config_from_file", "commands.config.config_args:ClusterConfig",
    "commands.config.config_args:BaseConfig",
]  # fmt: skip


@probe(*COVERED, "commands.config.config_args:SageMakerConfig", content=[*CONTENTS, *TEXTS], ending=["yaml", "json"])
def loaded(content, ending):
    config = config_args.load_config_from_file(write(content, ending))
    return described(config)


@probe(
    "commands.config.default:write_basic_config", precision=words("no fp16 bf16 fp8 FP16 BF16 what", "", None),
    place=["new.json", "new.yaml", "d/e/new.json", "old.json", Path("new.json")],
)  # fmt: skip
def basic_config(precision, place):
    Path("old.json").write_text("{}")
    result = default.write_basic_config(precision, place)
    yield "returns", result
    yield "content", yaml.safe_load(Path(place).read_text())


OLD = [
    "head", "fsdp", "dynamo", "misc", "amazon", "old fp16", "old dynamo", "unknown", "empty", "kind TPU",
    "without debug", "precision what", "nothing", "list",
]  # fmt: skip


@probe(
    "commands.config.update:update_config", "commands.config.update:update_config_command", content=OLD,
    ending=["yaml", "json"], way=["update_config", "update_config_command"],
)  # fmt: skip
def updated(content, ending, way):
    path = write(content, ending)
    yield "returns", getattr(update, way)(argparse.Namespace(config_file=path))
    yield "content", yaml.safe_load(Path(path).read_text())


@probe(
    "commands.config.cluster:get_cluster_input", "commands.config.sagemaker:get_sagemaker_input",
    "commands.config.config:get_user_input", "commands.config.config:config_command",
    function=["cluster", "sagemaker", "user", "command"],
)  # fmt: skip
def ended_input(function):
    with mock.patch.object(builtins, "input", mock.Mock(side_effect=EOFError)):
        if function == "command":
            return config_command.config_command(argparse.Namespace(config_file="new.yaml"))
        return {
            "cluster": cluster.get_cluster_input,
            "sagemaker": sagemaker.get_sagemaker_input,
            "user": config_command.get_user_input,
        }[function]()
