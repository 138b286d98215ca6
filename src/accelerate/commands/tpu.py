"""`accelerate tpu-config`: run commands on all machines of a TPU pod, through Google's `gcloud`."""

import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
from typing import Any

from accelerate.commands.utils import make_parser, or_exit
from accelerate.launch.errors import LaunchError


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate tpu-config`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "tpu-config",
        "Run commands on all machines of a TPU pod.",
        subparsers,
        tpu_command_launcher,
        allow_abbrev=False,
    )
    parser.add_argument("--config_file", type=str, help="Configuration file that names the pod and the commands.")
    parser.add_argument("--tpu_name", help="Name of the TPU; by default that of the configuration file.")
    parser.add_argument("--tpu_zone", help="Its zone; by default that of the configuration file.")
    parser.add_argument("--use_alpha", action="store_true", help="Use `gcloud alpha`.")
    parser.add_argument("--command_file", help="A file of commands, one on each line.")
    parser.add_argument("--command", action="append", nargs="+", help="A command; give it once for each.")
    parser.add_argument("--install_accelerate", action="store_true", help="Install accelerate first.")
    parser.add_argument("--accelerate_version", default="latest", help="Which version: latest, or a number.")
    parser.add_argument("--debug", action="store_true", help="Print the command instead of running it.")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands.

    Args:
        args: what `tpu_command_parser` parsed; missing values come from the configuration file.

    Raises:
        LaunchError: the pod has no name, there are no commands, or `gcloud` is not installed.
        FileNotFoundError: a file that was named does not exist.
        subprocess.CalledProcessError: a command failed.
    """
    command = _gcloud(args, _configuration(args))
    if args.debug:
        print(f"Running {shlex.join(command)}")
        return
    if shutil.which(command[0]) is None:
        raise LaunchError(
            "gcloud is not on the PATH. Install the Google Cloud CLI, or print the command with --debug."
        )
    subprocess.run(command, check=True)
    print("The commands ran on all machines of the pod.")


def _configuration(args: argparse.Namespace) -> dict[str, Any]:
    from accelerate.launch import config_file

    path = config_file.find(args.config_file, os.environ)
    return config_file.load_mapping(path) if path else {}


def _gcloud(args: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    name = args.tpu_name or config.get("tpu_name")
    zone = args.tpu_zone or config.get("tpu_zone")
    if not name or not zone:
        raise LaunchError(
            "Which pod? Give --tpu_name and --tpu_zone, or put tpu_name and tpu_zone in the configuration file."
        )
    lines = ["cd /usr/share"]
    if args.install_accelerate:
        lines.append(f"pip install {_requirement(args.accelerate_version)}")
    commands = _commands(args, config)
    if not commands and not args.install_accelerate:
        raise LaunchError("What shall run? Give --command or --command_file, or --install_accelerate.")
    gcloud = [
        "gcloud",
        *(["alpha"] if args.use_alpha else []),
        "compute",
        "tpus",
        "tpu-vm",
        "ssh",
        name,
        "--zone",
        zone,
    ]
    return [*gcloud, "--command", "; ".join([*lines, *commands]), "--worker", "all"]


def _requirement(version: str) -> str:
    if version == "dev":
        raise LaunchError(
            "--accelerate_version dev is not available in this version. What works: latest, or a number."
        )
    return "accelerate -U" if version == "latest" else f"accelerate=={version}"


def _commands(args: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    if args.command:
        return [word if isinstance(word, str) else " ".join(word) for word in args.command]
    file = args.command_file or config.get("command_file")
    if file:
        return [line for line in pathlib.Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    return list(config.get("commands") or [])


def main() -> None:
    """Run `accelerate tpu-config` as a program of its own.

    Raises:
        SystemExit: with status 2 for a request that cannot be run.
    """
    or_exit("accelerate tpu-config", tpu_command_launcher, tpu_command_parser().parse_args())


if __name__ == "__main__":
    main()
