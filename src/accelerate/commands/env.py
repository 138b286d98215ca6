"""`accelerate env`: versions, devices, configuration and what a launch would make of them, for a bug report."""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from accelerate import __version__
from accelerate.commands.utils import make_parser, or_exit
from accelerate.config.env import read_all
from accelerate.config.options import OPTIONS
from accelerate.launch import config_file
from accelerate.launch.secrets import masked

# What decides a run besides the options of the table: ranks, devices, schedulers, communication.
_TELLING = re.compile(
    "(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|CUDA|HIP|ROCR|ZE|ASCEND|NEURON|XLA|TPU|"
    "OMP|MKL|CCL|I_MPI|SLURM|OMPI_COMM_WORLD|PMI|PBS|LSB|HF|UCC|MLU|MUSA|SDAA|HABANA|DS)_.+"
    "|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT|PJRT_DEVICE"
)
_COMPANIONS = (
    *("transformers", "peft", "trl", "diffusers", "datasets", "evaluate", "sentence-transformers", "timm", "kernels"),
    *(
        "huggingface_hub",
        "safetensors",
        "torchdata",
        "torchvision",
        "torchaudio",
        "triton",
        "fsspec",
        "transformers_patch",
    ),
    *(
        "deepspeed",
        "megatron-core",
        "transformer-engine",
        "torchao",
        "msamp",
        "bitsandbytes",
        "flash-attn",
        "xformers",
    ),
    *("torch_xla", "torch_npu", "torch_mlu", "torch_musa", "torch_sdaa", "torch_neuronx", "optimum-neuron"),
    *("intel_extension_for_pytorch", "oneccl_bind_pt", "habana-torch-plugin", "mpi4py", "pynvml", "nvidia-ml-py"),
    *("wandb", "tensorboard", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"),
    *("sagemaker", "boto3", "argcomplete", "lightning", "torchft-nightly", "s3fs"),
)
# Any module that exists; what would run is not the question.
_SOME_MODULE = "accelerate.test_utils.scripts.test_cli"


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate env`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "env",
        "Print versions, devices and configuration, for a bug report.",
        subparsers,
        env_command,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config_file", help="The configuration file to show; by default the one that a launch reads."
    )
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print the report, ready to be pasted into an issue. Values of secrets are not in it.

    A configuration file or a variable that makes no sense is a line of the report.

    Args:
        args: what `env_command_parser` parsed.

    Returns:
        The same facts by name.

    Raises:
        FileNotFoundError: `--config_file` names no file.
    """
    path = config_file.find(args.config_file, os.environ)
    facts = _system()
    content = _content(path)
    facts["Variables"] = _variables(os.environ) or "none set"
    facts["Configuration file"] = path or f"none ({config_file.default_path()} does not exist)"
    options, problem = _options(args, os.environ)
    facts["Options that are set"] = options or "none; all have their defaults"
    if problem:
        facts["Problem of the configuration"] = problem
    would = _launch(args, os.environ)
    facts["`accelerate launch` without arguments"] = (
        would.replace(problem, "see the problem above") if problem else would
    )

    print("\nCopy the lines below into your issue.\n")
    for name, value in {**facts, **({"`Accelerate` config": content} if content else {})}.items():
        print(f"- {name}:{_list(value)}" if isinstance(value, dict) else f"- {name}: {value}")
    facts["`Accelerate` configs"] = content
    return facts


def _system() -> dict[str, Any]:
    """Versions, devices and memory."""
    facts: dict[str, Any] = {
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
        facts["PyTorch version"] = f"{_version('torch') or 'not installed'}; {_brief(error)}"
    facts["System RAM"] = _memory()
    facts["CPU cores"] = os.cpu_count()
    facts["Libraries"] = {name: version for name in _COMPANIONS if (version := _version(name))} or "none"
    return facts


def _torch() -> dict[str, Any]:
    import torch

    from accelerate.devices import probe

    device = probe.detect()
    return {
        "PyTorch version": torch.__version__,
        "PyTorch accelerator": device.type.upper() if device.type != "cpu" else "none",
        "Devices": _devices(device),
        "Process group backends": ", ".join(_backends()) or "none; torch was built without torch.distributed",
    }


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    # Each has a test of its own; a vendor's plug-in registers its backend when it is loaded.
    tests = {name: getattr(dist, f"is_{name}_available", None) for name in ("gloo", "nccl", "mpi", "ucc", "xccl")}
    known = [name for name, test in tests.items() if test is not None and test()]
    others = [name for name in dist.Backend.backend_list if name not in (*tests, "undefined", "fake", "threaded")]
    return [*known, *others]


def _content(path: os.PathLike[str] | None) -> dict[str, Any]:
    """Return what the configuration file holds, as far as it can be read; `_options` tells what is wrong with it."""
    try:
        return {} if path is None else masked(config_file.load_mapping(path))
    except (ValueError, OSError):
        return {}


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide a run, by name."""
    of_options = {name for option in OPTIONS for name in (option.env, *option.env_names) if name}
    telling = (name for name in environ if name in of_options or _TELLING.fullmatch(name))
    return {name: masked(environ[name], name) for name in sorted(telling)}


def _options(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the options that somebody has set (value and source, by name), and what keeps a launch from reading them."""
    from accelerate.launch.plan import Resolved, Source
    from accelerate.launch.resolve import merge

    notes: tuple[str, ...] = ()
    problem = ""
    try:
        merged = merge(argparse.Namespace(config_file=args.config_file), environ)
        values, notes = merged.values, merged.notes
    except (ValueError, OSError) as error:
        problem = _brief(error)
        values = {
            name: Resolved(value, Source.ENVIRONMENT, f"environment variable {variable}")
            for name, (value, variable) in _readable(environ).items()
        }
    rows = {
        name: f"{masked(resolved.value, name)} ({resolved.origin})"
        for name, resolved in values.items()
        if resolved.source is not Source.DEFAULT and name != "config_file"
    }
    return rows | {f"note {number}": masked(note) for number, note in enumerate(notes, 1)}, problem


def _readable(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return the options that the environment sets to something that they take: name to value and variable."""
    found: dict[str, tuple[Any, str]] = {}
    for option in OPTIONS:
        mine = {name: environ[name] for name in (option.env, *option.env_names) if name and name in environ}
        try:
            found |= read_all(mine)
        except ValueError:
            continue
    return found


def _launch(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Say what a launch with no arguments but a script would do, or why it would not start."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.launch.report import summary
    from accelerate.launch.resolve import resolve
    from accelerate.launch.runners import RUNNERS

    words = ["--module", _SOME_MODULE]
    if args.config_file is not None:
        words = ["--config_file", args.config_file, *words]
    try:
        plan = resolve(launch_command_parser().parse_args(words), environ)
    except (ValueError, OSError) as error:
        return f"would not start: {_brief(error)}"
    except Exception as error:  # a fault of ours belongs into the report as well
        return f"would not start: {type(error).__name__}: {_brief(error)}"
    lines = [f"{summary(plan)}, started {RUNNERS[plan.runner]} (runner: {plan.runner})"]
    return "; ".join([*lines, *map(masked, plan.notes)])


def _list(content: Mapping[str, Any], indent: str = "\t") -> str:
    lines = []
    for key, value in content.items():
        nested = isinstance(value, Mapping) and value
        lines.append(f"{indent}- {key}: {_list(value, indent + chr(9)) if nested else value}")
    return "\n" + "\n".join(lines)


def _brief(error: BaseException) -> str:
    return masked(" ".join(f"{error}".split())) or type(error).__name__


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices(device: Any) -> str:
    if device.type == "cpu":
        return "none besides the CPU"
    namespace = device.namespace()
    names = [
        namespace.get_device_name(index) if hasattr(namespace, "get_device_name") else device.type
        for index in range(device.count())
    ]
    return f"{len(names)} ({', '.join(dict.fromkeys(names))})"


def _memory() -> str:
    try:
        import psutil
    except ImportError as error:
        return f"unknown ({error})"
    return f"{psutil.virtual_memory().total / 1024**3:.2f} GB"


def main() -> None:
    """Run `accelerate env` as a program of its own.

    Raises:
        SystemExit: with status 2 if the configuration file does not exist.
    """
    or_exit("accelerate env", env_command, env_command_parser().parse_args())


if __name__ == "__main__":
    main()
