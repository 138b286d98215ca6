"""`accelerate config default`: a configuration file for this machine, without questions."""

import argparse
import os
import pathlib
from typing import Any, Literal

from accelerate.base import _lazy
from accelerate.config.options import BY_NAME
from accelerate.extensions.configure import config_utils
from accelerate.extensions.configure.config_args import ClusterConfig, default_json_config_file
from accelerate.launch import hardware

__getattr__ = _lazy.aliases("accelerate.commands.config.default")

description = "Write a configuration file for this machine, without questions."


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] = default_json_config_file
) -> pathlib.Path | Literal[False]:
    """Write a configuration file for this machine: all its devices, or the CPU.

    An existing file is not changed.

    Not a collective.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        save_location: the path; the ending `.json` makes it JSON, everything else YAML.

    Returns:
        The file, or False if there was one already.

    Raises:
        ValueError: `mixed_precision` is none of these, or (a LaunchError) the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_basic_config("bf16", f"{folder}/config.yaml")
        ...     "mixed_precision: bf16" in path.read_text()
        True
    """
    path = pathlib.Path(save_location)
    if path.is_file():
        print(f"There is already a configuration at {path}; it was not changed. Remove it, or name another file.")
        return False
    config_utils.check_writable(save_location)
    precision = BY_NAME["mixed_precision"].parse(str(mixed_precision))
    from accelerate.extensions.configure.cluster import KINDS  # not for --help

    machine = hardware.detect(os.environ)
    device = machine.device if machine.count > 1 else None
    kind = next(kind.word for kind in KINDS if kind.device == device)
    config = ClusterConfig("LOCAL_MACHINE", kind, precision, use_cpu=machine.count == 0, debug=False)
    config.num_processes = max(1, machine.count)
    return config.save(path)


def default_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config default` to what `ArgumentParser.add_subparsers` returned."""
    command = config_utils.add_command(parser, parents, "default", description, default_config_command)
    text = "The file to write; by default the one that `accelerate launch` looks for."
    command.add_argument("--config_file", dest="save_location", default=default_json_config_file, help=text)
    text = "Precision of the computation."
    command.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no", help=text)
    return command


def default_config_command(args: argparse.Namespace) -> None:
    """Run `accelerate config default`."""
    path = write_basic_config(args.mixed_precision, args.save_location)
    if path:
        print(f"accelerate configuration saved at {path}")
