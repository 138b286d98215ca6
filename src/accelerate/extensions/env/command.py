"""`accelerate env`: versions, devices and configuration, for a bug report."""

import argparse
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import accelerate
from accelerate import __version__
from accelerate.base import _lazy
from accelerate.commands.utils import brief, make_parser, or_exit
from accelerate.config.options import OPTIONS
from accelerate.config.strategies import third_parties
from accelerate.launch import config_file
from accelerate.launch.secrets import masked

__getattr__ = _lazy.aliases("accelerate.commands.env")

version = __version__


# Variables besides those of the option table that affect a run: ranks, devices, schedulers, communication.
_OF_A_RUN = re.compile(
    "(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|CUDA|HIP|ROCR|ZE|ASCEND|NEURON|XLA|TPU|"
    "OMP|MKL|CCL|I_MPI|SLURM|OMPI_COMM_WORLD|PMI|PBS|LSB|HF|UCC|MLU|MUSA|SDAA|HABANA|DS)_.+"
    "|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT|PJRT_DEVICE"
)
_COMPANIONS = (
    "transformers peft trl diffusers datasets huggingface_hub safetensors torchdata torchvision triton fsspec deepspeed "
    "megatron-core transformer-engine torchao bitsandbytes flash-attn torch_xla torch_npu torch_mlu torch_musa torch_sdaa "
    "torch_neuronx intel_extension_for_pytorch habana-torch-plugin mpi4py nvidia-ml-py wandb tensorboard mlflow comet_ml aim "
    "clearml dvclive swanlab trackio sagemaker"
)

# Releases of other packages that compute something wrong without a message: distribution, versions, fault, replacement, source.
_FAULTS = (
    (
        "deepspeed",
        ">=0.17.6,<0.18.3",
        "with ZeRO stage 2 gradients are too small",
        "0.18.3 or newer, or stage 3",
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
    ),
    (
        "deepspeed",
        ">=0.18.3,<=0.19.3",
        "with ZeRO stage 2 in bf16 on several ranks, part of the gradient is lost if a module is called more than once in a step",
        "another release or stage for such a model",
        "https://github.com/deepspeedai/DeepSpeed/issues/8224",
    ),
    (
        "bitsandbytes",
        ">=0.36,<0.41.1",
        "8-bit optimizers round wrongly, and the loss may become NaN",
        "0.41.1 or newer",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/152",
    ),
    (
        "bitsandbytes",
        "==0.48.0",
        "models that were saved in 8 bits compute wrong results",
        "0.48.1 or newer",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1775",
    ),
)


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate env`, or add it to what `add_subparsers` returned."""
    description = "Print versions, devices and configuration, for a bug report."
    parser = make_parser("env", description, subparsers, env_command, allow_abbrev=False)
    which = "The configuration file to show; by default the one that a launch reads."
    parser.add_argument("--config_file", help=which)
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print the report, ready to be pasted into an issue. Values of secrets are not in it.

    A configuration file that cannot be read is a line of the report; `accelerate config validate` finds more. `args` is
    what `env_command_parser` parsed.

    Returns:
        The same facts by name.

    Raises:
        FileNotFoundError: `--config_file` names no file.
    """
    path = config_file.find(args.config_file, os.environ)
    facts = _system()
    of_options = {name for option in OPTIONS for name in (option.env, *option.env_names)}
    names = sorted(name for name in os.environ if name in of_options or _OF_A_RUN.fullmatch(name))
    facts["Variables"] = {name: masked(os.environ[name], name) for name in names} or "none set"
    facts["Configuration file"] = path or f"none ({config_file.default_path()} does not exist)"
    try:
        facts["`Accelerate` configs"] = {} if path is None else masked(config_file.load_mapping(path))
    except (ValueError, OSError) as error:
        facts["`Accelerate` configs"] = f"cannot be read: {masked(brief(error))}"
    print("\nCopy the lines below into your issue.\n")
    for name, value in facts.items():
        print(f"- {name}:{_list(value)}" if value and isinstance(value, dict) else f"- {name}: {value}")
    return facts


def _system() -> dict[str, Any]:
    """Versions, devices and memory."""
    import psutil  # not for --help

    facts: dict[str, Any] = {
        "Which accelerate": _which(),
        "`Accelerate` version": __version__,
        "Platform": platform.platform(),
        "`accelerate` bash location": shutil.which("accelerate") or "not on the PATH",
        "Python version": platform.python_version(),
        "Python executable": sys.executable,
        "Numpy version": _version("numpy") or "not installed",
    }
    try:
        facts |= _torch()
    except Exception as error:  # a torch that does not load is what many reports are about
        facts["PyTorch version"] = f"{_version('torch') or 'not installed'}; {masked(brief(error))}"
    facts["System RAM"] = f"{psutil.virtual_memory().total / 1024**3:.2f} GB"
    facts["CPU cores"] = os.cpu_count()
    versions = {name: _version(name) for name in _COMPANIONS.split()}
    facts["Strategies of other packages"] = _third_parties()
    facts["Libraries"] = {name: version for name, version in versions.items() if version} or "none"
    facts["Known faults of these releases"] = dict(enumerate(_faults(), 1)) or "none"
    return facts


def _third_parties() -> Any:
    try:
        return {spec.name: spec.strategy for spec in third_parties()} or "none"
    except ImportError as error:
        return masked(brief(error))


def _which() -> str:
    """Return which package this is and where it was imported from; another installed one is named."""
    which = f"the independent fork, imported from {pathlib.Path(accelerate.__file__).parent}"
    installed = _version("accelerate")
    if installed in ("", __version__):
        return which
    return f"{which}; pip has accelerate {installed} installed, which another working directory or path may import"


def _torch() -> dict[str, Any]:
    import torch

    from accelerate.devices import table

    device = table.detect()
    kind, devices = "none", "none besides the CPU"
    if device.type != "cpu":
        name_of = getattr(device.namespace(), "get_device_name", lambda index: device.type)
        names = dict.fromkeys(name_of(index) for index in range(device.count()))
        kind, devices = device.type.upper(), f"{device.count()} ({', '.join(names)})"
    return {"PyTorch version": torch.__version__, "PyTorch accelerator": kind, "Devices": devices}


def _faults() -> list[str]:
    """Return the known faults of the installed releases, in words."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return [
        f"{name} {version}: {fault}. Use {replacement}. See {source}"
        for name, releases, fault, replacement, source in _FAULTS
        if (version := _version(name)) and Version(Version(version).base_version) in SpecifierSet(releases)
    ]


def _list(content: Mapping[str, Any], indent: str = "\t") -> str:
    lines = []
    for key, value in content.items():
        nested = isinstance(value, Mapping) and value
        lines.append(f"\n{indent}- {key}: {_list(value, indent + chr(9)) if nested else value}")
    return "".join(lines)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Run `accelerate env` as a separate program; status 2 if the configuration file does not exist."""
    or_exit("accelerate env", env_command, env_command_parser().parse_args())


if __name__ == "__main__":
    main()
