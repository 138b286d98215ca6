"""Comparisons of launches: what is validated, what scripts and functions see, and what is refused."""

import json
import os
import subprocess
import sys

import torch

from accelerate import launchers
from accelerate.commands import launch
from accelerate.commands.config.config_args import SageMakerConfig
from interop.differential.core import probe, words
from interop.differential.probes.configs import write
from interop.differential.probes.launching import listed, parsed
from interop.differential.probes.preparing import SAGEMAKER, complete, seen, work


def named(name):
    """Write one of the files of `configs`; return the options that name it."""
    return ["--config_file", write(name, "json" if name == "fp8" else "yaml")] if name else []


def script(text=""):
    names = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "FP8_")
    more = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    with open("s.py", "w") as file:
        file.write(
            "import json, os, sys\n"
            f"found = {{k: v for k, v in sorted(os.environ.items()) if k.startswith({names}) or k in {more}}}\n"
            "json.dump([sys.argv, found], open('seen.json', 'w'))\n" + text
        )


CONFIGS = [
    "", "head", "cpu True", "precision bf16", "precision what", "kind what", "dynamo", "fsdp one", "fp8", "network",
    "unknown", "two unknown", "nothing", "list", "broken",
]  # fmt: skip
USUAL = {"gpu_ids": "all", "machine_rank": 0, "num_processes": 1, "main_training_function": "main", "debug": False}


@probe(
    "commands.launch:_validate_launch_command", quick=16, config=CONFIGS,
    line=[
        "", "--cpu", "--mixed_precision fp16",
        "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no", "--dynamo_backend eager",
        "--multi_gpu --cpu", "--tpu --use_deepspeed", "--machine_rank 0", "--num_cpu_threads_per_process 2", "--debug",
        "--gpu_ids 0 --num_processes 1",
    ],
)  # fmt: skip
def validated(config, line):
    """Give what the launcher makes of its arguments and a file; what stands for the default is spelled in one way."""
    script()
    os.environ.pop("ACCELERATE_USE_CPU")
    args = parsed(*named(config), *line.split(), "s.py")
    args, defaults, from_file = launch._validate_launch_command(args)
    names = listed(
        "cpu use_cpu multi_gpu tpu use_fsdp use_deepspeed use_megatron_lm mixed_precision dynamo_backend num_processes num_machines "
        "machine_rank gpu_ids main_process_ip main_process_port debug fsdp_version fsdp_auto_wrap_policy fsdp_offload_params "
        "dynamo_mode dynamo_use_dynamic main_training_function fp8_backend fp8_format fp8_margin zero_stage gradient_accumulation_steps "
        "use_parallelism_config parallelism_config_tp_size num_cpu_threads_per_process"
    )
    found = {name: getattr(args, name, None) for name in names}
    found = {
        name: USUAL.get(name) if value in (None, 0) and value is not False else value for name, value in found.items()
    }
    found["cpu"] = found.pop("use_cpu") or found["cpu"]
    yield "file", [type(defaults), from_file]
    switches = [name for name in found if name.startswith("use_") or name in ("multi_gpu", "tpu", "cpu")]
    yield "switches", {name: bool(found[name]) for name in switches}
    yield "others", {name: str(value).lower() for name, value in found.items() if name not in switches}


@probe(
    "commands.launch:main", "commands.accelerate_cli:main", slow=True, ending=["", "sys.exit(3)"],
    module=["commands.launch", "commands.accelerate_cli launch"],
)  # fmt: skip
def consoles(ending, module):
    script(ending)
    words = [sys.executable, "-m", *f"accelerate.{module} --cpu s.py".split()]
    done = subprocess.run(words, capture_output=True, check=False)
    return [done.returncode != 0, seen() is not None]


@probe(
    "commands.launch:launch_command", "commands.launch:simple_launcher", slow=True,
    line=[
        "-m mod --x 1", "-m pkg.mod", "--module no.such", "--no_python true", "--no_python no-such-program", "no.py",
        "-m --no_python x", "--cpu ./s.py", "d/s.py", "d",
    ],
)  # fmt: skip
def scripts(line):
    script()
    os.makedirs("pkg"), os.makedirs("d")
    for place in ("mod.py", "pkg/mod.py", "pkg/__init__.py", "d/s.py"):
        with open("s.py") as file, open(place, "w") as copy:
            copy.write(file.read())
    launch.launch_command(complete("--cpu", line))
    return seen() and seen()[0]


def number(name):
    script()
    args = complete("--cpu" if name == "sagemaker" else "")
    config = SageMakerConfig(**{**SAGEMAKER, "profile": "p"})
    return (
        launch.sagemaker_launcher(config, args) if name == "sagemaker" else getattr(launch, f"{name}_launcher")(args)
    )


probe(
    *(f"commands.launch:{name}_launcher" for name in ("tpu", "tpu_pod", "sagemaker", "deepspeed")),
    name=["tpu", "tpu_pod", "sagemaker"],
)(number)


@probe(
    "launchers:notebook_launcher", processes_=[1, "1", 0, -1, None, 1.0, True],
    precision=words("no bf16 fp16 fp8 BF16 what", "", None),
)  # fmt: skip
def notebook(processes_, precision):
    result = launchers.notebook_launcher(work, num_processes=processes_, mixed_precision=precision)
    return [result, seen(), os.environ.get("ACCELERATE_MIXED_PRECISION")]


def left():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.ones(2) * accelerator.process_index).tolist()
    with open(f"rank{accelerator.process_index}.json", "w") as file:
        json.dump(
            [accelerator.num_processes, accelerator.distributed_type.value, accelerator.mixed_precision, total], file
        )
    accelerator.wait_for_everyone()
    accelerator.end_training()


def collected():
    files = sorted(name for name in os.listdir() if name.startswith("rank"))
    return [json.load(open(name)) for name in files]


@probe("launchers:debug_launcher", slow=True, count=[0, -1, None, "2"])
def debug_counts(count):
    launchers.debug_launcher(left, num_processes=count)
    return collected()


@probe("commands.launch:multi_gpu_launcher", slow=True, count=[1, 2], ending=["", "sys.exit(3)"])
def torchrun(count, ending):
    script(
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'ACCELERATE_MIXED_PRECISION')\n"
        "json.dump([os.environ.get(k) for k in names], open(f'rank{os.environ[\"RANK\"]}.json', 'w'))\n" + ending
    )
    launch.multi_gpu_launcher(complete(f"--cpu --num_processes {count} --main_process_port 0 --mixed_precision bf16"))
    return collected()
