"""Comparisons of commands and environments of the processes that `accelerate launch` starts, and of `accelerate.launchers`."""

import json
import os
import sys
from pathlib import Path

from accelerate.commands.config.config_args import SageMakerConfig
from accelerate.utils import launch as prepare
from interop.differential.core import probe, words
from interop.differential.probes.launching import OPTIONS, listed, parsed

FEATURES = {
    "none": "", "dynamo": "--dynamo_backend inductor", "fsdp": "--use_fsdp", "deepspeed": "--use_deepspeed",
    "megatron": "--use_megatron_lm", "parallelism": "--use_parallelism_config",
    "fp8": "--mixed_precision fp8 --fp8_backend te",
}  # fmt: skip
SWITCH_OF = {"fsdp": "fsdp", "megatron": "megatron", "parallelism": "parallelism", "dynamo": "dynamo", "fp8": "fp8"}
DEFAULTS = {
    "num_processes": 1, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no",
    "num_cpu_threads_per_process": 1, "machine_rank": 0,
}  # fmt: skip


def complete(words, script="s.py --x 1"):
    """Parse a line and fill in what the launcher fills in before it prepares anything."""
    args = parsed(*words.split(), *script.split())
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.use_cpu = args.cpu
    args.deepspeed_fields_from_accelerate_config = ""
    args.deepspeed_multinode_launcher = args.deepspeed_multinode_launcher or "pdsh"
    return args


def tpu(args):
    same, found = prepare.prepare_tpu(args, {"A": "1"})
    return [same is args, args.vm], found


STARTERS = {
    "simple_command": prepare.prepare_simple_launcher_cmd_env,
    "several": lambda args: (None, prepare.prepare_multi_gpu_env(args)),
    "deepspeed": prepare.prepare_deepspeed_cmd_env,
    "extended": lambda args: (None, prepare.prepare_extend_env_parallelism_config(args, {"A": "1"})),
    "fp8": lambda args: (None, prepare.setup_fp8_env(args, {"A": "1"})),
    "tpu": tpu,
}


def prepared(function, words):
    command, found = STARTERS[function](complete(words))
    command = (
        [str(word).replace(sys.executable, "python") for word in command] if isinstance(command, list) else command
    )
    found = {k: v for k, v in sorted(found.items()) if os.environ.get(k) != v and k != "PYTHONPATH"}
    for name in ("FPROP", "DGRAD", "WGRAD"):
        if (flag := f"ACCELERATE_FP8_OVERRIDE_{name}") in found:
            found[flag] = {"0": "False", "1": "True"}.get(found[flag], found[flag])
    return command, found


COVERED = [
    f"utils.launch:{name}"
    for name in listed(
        "prepare_simple_launcher_cmd_env prepare_multi_gpu_env prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config "
        "setup_fp8_env prepare_tpu"
    )
]
FP8 = [f"--mixed_precision fp8 --fp8_backend {name}" for name in ("te", "ao", "msamp")]
SETUPS = {
    "simple_command": [
        "--num_processes 2", "--num_processes 2 --main_process_ip h --main_process_port 5",
        "--num_processes 2 --main_process_port 0", "--main_process_port 1234", "--main_process_ip h", "--gpu_ids 0,1",
        "--gpu_ids all", "--gpu_ids 1", "--gpu_ids ,", "--num_cpu_threads_per_process 3",
        "--num_cpu_threads_per_process 0", "--module", "--no_python", "--module --no_python", "--enable_cpu_affinity",
        "--mixed_precision bf16", "--mixed_precision fp16", "--quiet", "--downcast_bf16 --mixed_precision bf16",
        "--cpu --num_cpu_threads_per_process 2", "--debug --cpu", "--tee 3 --log_dir d --role r",
        "--max_restarts 2 --monitor_interval 3", "--gradient_accumulation_steps 3 --gradient_clipping 1.5", "--cpu",
        "--dynamo_backend inductor", "--debug", *FP8,
    ], "extended": ["", "--use_parallelism_config"], "fp8": ["", *FP8], "tpu": ["", "--tpu", "--debug", FP8[0]],
    "several": [
        "--multi_gpu", "--use_fsdp", "--use_fsdp --fsdp_version 2", "--use_megatron_lm", "--use_parallelism_config",
        "--dynamo_backend inductor", "--debug", *FP8, "--num_processes 2", "TWO", "TWO --same_network",
        "TWO --rdzv_backend c10d", "TWO --rdzv_backend c10d --machine_rank 1",
        "TWO --rdzv_backend static --machine_rank 1", "TWO --same_network --machine_rank 1", "TWO --num_processes 3",
        "TWO --num_processes 1", "--main_process_port 1234", "--main_process_port 0", "--main_process_ip h",
        "--gpu_ids 0,1", "--gpu_ids all", "--gpu_ids 1", "--num_cpu_threads_per_process 3", "--module", "--no_python",
        "--module --no_python", "--enable_cpu_affinity", "--mixed_precision bf16", "--rdzv_conf a=1,b=2",
        "--tee 3 --log_dir d --role r", "--max_restarts 2 --monitor_interval 3", "--gradient_accumulation_steps 3",
        "--use_fsdp --use_parallelism_config", "--use_fsdp --mixed_precision fp8 --fp8_backend ao",
        "--mixed_precision fp16 --debug",
        "--cpu --use_fsdp --fsdp_cpu_ram_efficient_loading true --fsdp_sync_module_states false",
        "--use_fsdp --dynamo_backend inductor",
    ],
    "deepspeed": [
        "--num_processes 2", "--zero_stage 3 --zero3_init_flag true", "--zero_stage 0",
        "--deepspeed_config_file none.json", "--gpu_ids 0,1", "--mixed_precision bf16",
        "--mixed_precision fp8 --fp8_backend te", "--debug", "--module", "--no_python", "--module --no_python",
        "--gradient_accumulation_steps 3 --gradient_clipping 1.5",
        "--offload_optimizer_device cpu --offload_param_device nvme",
        "--offload_optimizer_nvme_path /a --offload_param_nvme_path /b", "--deepspeed_moe_layer_cls_names A,B",
        "--use_parallelism_config", "TWO --deepspeed_multinode_launcher standard", "TWO --deepspeed_hostfile f",
        "TWO --deepspeed_hostfile f --deepspeed_multinode_launcher pdsh",
        "TWO --deepspeed_hostfile f --deepspeed_inclusion_filter a@b:0",
        "TWO --deepspeed_hostfile f --deepspeed_exclusion_filter a:0",
        "TWO --deepspeed_hostfile f --deepspeed_multinode_launcher openmpi",
        "TWO --deepspeed_hostfile f --deepspeed_multinode_launcher mvapich", "TWO --deepspeed_hostfile f --module",
        "TWO --deepspeed_hostfile f --no_python", "TWO --deepspeed_hostfile f --deepspeed_multinode_launcher what",
        "TWO --deepspeed_hostfile f --deepspeed_inclusion_filter a --deepspeed_exclusion_filter b",
        "TWO --deepspeed_hostfile f --machine_rank 1",
    ],
}  # fmt: skip


@probe(*COVERED, quick=24, run=[f"{function} {words}" for function, lines in SETUPS.items() for words in lines])
def setups(run):
    """Give the command, what the arguments have gained, and the variables that a plain line does not set."""
    function, _, words = run.partition(" ")
    words = words.replace("TWO", "--num_processes 4 --num_machines 2 --main_process_ip h --main_process_port 1")
    words += " --use_deepspeed" if function == "deepspeed" else ""
    args = complete(words)
    before = dict(vars(args))
    command, variables = prepared(function, words)
    _, plain = prepared(function, "--use_deepspeed" if function == "deepspeed" else "")
    STARTERS[function](args)
    found = {k: v for k, v in sorted(vars(args).items()) if before.get(k, "<absent>") != v}
    yield "command", command
    yield "args", found if "port 0" not in words else sorted(found)
    yield "variables", {k: v for k, v in variables.items() if plain.get(k) != v}


VALUES = {
    name: [v for v in values if v not in ("", "99999999999999999999", "007", "1_0", "1.0", "X Y")][:4]
    for name, values in OPTIONS.items()
    if name not in ("config_file", "vm", "env", "aws_access_key_id", "aws_secret_access_key")
}


def switch_of(name):
    prefix = name.partition("_")[0]
    if prefix in SWITCH_OF:
        return SWITCH_OF[prefix]
    return "deepspeed" if prefix in ("zero", "zero3", "offload", "gradient", "deepspeed") else "none"


def variables_of_options(given):
    """Give what one more option changes in the variables."""
    name, _, value = given.partition("=")
    feature = switch_of(name)
    function = {"deepspeed": "deepspeed", "parallelism": "extended", "fp8": "fp8", "none": "simple_command"}.get(
        feature, "several"
    )
    _, plain = prepared(function, FEATURES[feature])
    _, found = prepared(function, f"{FEATURES[feature]} --{given}")
    return {k: found.get(k, "<absent>") for k in sorted({*plain, *found}) if plain.get(k) != found.get(k)}


probe(*COVERED, given=[f"{name}={value}" for name, values in VALUES.items() for value in values])(variables_of_options)


def work():
    names = "LOCAL_RANK RANK FORK_LAUNCHED NODE_RANK NPROC ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU ACCELERATE_DEBUG_MODE WORLD_SIZE MASTER_ADDR"
    Path("seen.json").write_text(json.dumps({k: os.environ.get(k) for k in names.split()}))


def seen():
    return json.loads(Path("seen.json").read_text()) if os.path.exists("seen.json") else None


@probe("utils.launch:PrepareForLaunch", kind=words("no multi_gpu what", "", None, 0))
def prepare_for_launch_words(kind):
    starter = prepare.PrepareForLaunch(work, kind)
    return [starter.distributed_type, starter(0), seen()]


SAGEMAKER = {
    "ec2_instance_type": "ml.p3.2xlarge", "iam_role_name": "role", "compute_environment": "AMAZON_SAGEMAKER",
    "distributed_type": "NO", "mixed_precision": "no", "use_cpu": False, "debug": False,
}  # fmt: skip


@probe(
    "utils.launch:prepare_sagemager_args_inputs", "commands.config.config_args:SageMakerConfig",
    more=[
        {}, {"profile": "p"}, {"profile": "p", "region": "eu-west-1"}, {"profile": "p", "image_uri": "i"},
        {"profile": "p", "num_machines": 3}, {"profile": "p", "distributed_type": "DATA_PARALLEL"},
        {"profile": "p", "sagemaker_inputs_file": "inputs.tsv"},
        {"profile": "p", "sagemaker_metrics_file": "metrics.tsv"}, {"profile": "p", "base_job_name": "b"},
        {"profile": "p", "additional_args": {"a": 1}},
        {"profile": "p", "pytorch_version": "2.0", "transformers_version": "4.30", "py_version": "py310"},
    ],
    line=[
        "s.py", "s.py --x 1 --y z", "s.py --x", "s.txt --x 1", "--mixed_precision fp16 s.py",
        "--dynamo_backend inductor s.py --x 1", "--aws_access_key_id k --aws_secret_access_key s d/s.py --x 1.5",
    ],
)  # fmt: skip
def sagemaker(more, line):
    Path("inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://a\ntest\ts3://b\n")
    Path("metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=(.*)\n")
    from accelerate.utils import SageMakerDistributedType

    kind = SageMakerDistributedType(more.pop("distributed_type", "NO"))
    args = complete(
        line.rpartition("s.")[0].rpartition("d/")[0] if "d/" in line else line[: line.index("s.")],
        line[line.index("s.") :],
    )
    arguments, inputs = prepare.prepare_sagemager_args_inputs(
        SageMakerConfig(**{**SAGEMAKER, "distributed_type": kind, **more}), args
    )
    yield from arguments.items()
    yield "inputs", inputs
    yield "variables", {k: v for k, v in sorted(os.environ.items()) if k.startswith("AWS_")}
