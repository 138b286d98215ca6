"""`accelerate env`: versions, devices and configuration, for a bug report."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from typing import Any

from accelerate import __version__
from accelerate.commands.utils import make_parser, or_exit


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
    """Print the report, ready to be pasted into an issue.

    Args:
        args: what `env_command_parser` parsed.

    Returns:
        The same facts by name.

    Raises:
        FileNotFoundError: `--config_file` names no file.
    """
    import torch

    from accelerate.devices import probe
    from accelerate.launch import config_file

    device = probe.detect()
    facts: dict[str, Any] = {
        "`Accelerate` version": __version__,
        "Platform": platform.platform(),
        "`accelerate` bash location": shutil.which("accelerate") or "not on the PATH",
        "Python version": platform.python_version(),
        "Python executable": sys.executable,
        "Numpy version": _version("numpy"),
        "PyTorch version": torch.__version__,
        "PyTorch accelerator": device.type.upper() if device.type != "cpu" else "none",
        "Devices": _devices(device),
        "System RAM": f"{_memory():.2f} GB",
        "CPU cores": os.cpu_count(),
    }
    path = config_file.find(args.config_file, os.environ)
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(("ACCELERATE_", "FSDP_"))
    }
    facts["Variables"] = _list(variables) if variables else "none set"
    content = config_file.load_mapping(path) if path else {}
    facts["Configuration file"] = path or f"none ({config_file.default_path()} does not exist)"

    print("\nCopy the lines below into your issue.\n")
    for name, value in facts.items():
        print(f"- {name}: {value}")
    if path:
        print(f"- `Accelerate` config: {_list(content)}")
    facts["`Accelerate` configs"] = content
    return facts


def _list(content: dict[str, Any], indent: str = "\t") -> str:
    lines = []
    for key, value in content.items():
        lines.append(
            f"{indent}- {key}: {_list(value, indent + chr(9)) if isinstance(value, dict) and value else value}"
        )
    return "\n" + "\n".join(lines)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices(device: Any) -> str:
    if device.type == "cpu":
        return "none besides the CPU"
    namespace = device.namespace()
    names = [
        namespace.get_device_name(index) if hasattr(namespace, "get_device_name") else device.type
        for index in range(device.count())
    ]
    return f"{len(names)} ({', '.join(dict.fromkeys(names))})"


def _memory() -> float:
    import psutil

    return psutil.virtual_memory().total / 1024**3


def main() -> None:
    """Run `accelerate env` as a program of its own.

    Raises:
        SystemExit: with status 2 if the configuration file does not exist.
    """
    or_exit("accelerate env", env_command, env_command_parser().parse_args())


if __name__ == "__main__":
    main()
