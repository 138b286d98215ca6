"""`accelerate tpu-config`: run commands on all machines of a TPU pod, through Google's `gcloud`."""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

from accelerate.commands.utils import make_parser, or_exit
from accelerate.extensions.machines import launchers
from accelerate.extensions.tpu.pod import gcloud_ssh
from accelerate.launch import config_file, runners, secrets
from accelerate.launch.errors import LaunchError

_description = "Run commands on all machines of a TPU pod."


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate tpu-config`, or add it to what `add_subparsers` returned."""
    parser = make_parser("tpu-config", _description, subparsers, tpu_command_launcher, allow_abbrev=False)
    add = parser.add_argument
    add("--config_file", type=str, help="Configuration file that names the pod and the commands.")
    add("--tpu_name", help="Name of the TPU; by default that of the configuration file.")
    add("--tpu_zone", help="Its zone; by default that of the configuration file.")
    add("--use_alpha", action="store_true", help="Use `gcloud alpha`.")
    add("--command_file", help="A file of commands, one on each line.")
    add("--command", action="append", nargs="+", help="A command in quotes; may be given several times.")
    add("--install_accelerate", action="store_true", help="Install accelerate first.")
    add("--accelerate_version", default="latest", help="Which version: latest, or a number.")
    add("--debug", action="store_true", help="Print the command instead of running it.")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands.

    For programs: it returns, or raises what went wrong. `console` is the same for the console.

    Args:
        args: what `tpu_command_parser` parsed; missing values come from the configuration file.

    Raises:
        LaunchError: the pod has no name, there are no commands, a file cannot be read, or `gcloud` is not installed.
        FileNotFoundError: the configuration file that was named does not exist.
        subprocess.CalledProcessError: a command failed.
    """
    path = config_file.find(args.config_file, os.environ)
    command = _gcloud(args, config_file.load_mapping(path) if path else {})
    if args.debug:
        print(f"Running {shlex.join(secrets.command(command))}")
        return
    launchers.require_program("gcloud", os.environ, "Install the Google Cloud CLI, or print the command with --debug.")
    runners.start(command, os.environ)
    print("The commands ran on all machines of the pod.")


def console(args: argparse.Namespace) -> None:
    """Run `accelerate tpu-config` for the console: status 2 if nothing was run, else the status of gcloud."""
    try:
        or_exit("accelerate tpu-config", tpu_command_launcher, args)
    except subprocess.CalledProcessError as error:
        print(f"accelerate tpu-config: gcloud ended with status {error.returncode}.", file=sys.stderr)
        raise SystemExit(error.returncode if error.returncode > 0 else 128 - error.returncode) from None


def _gcloud(args: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    name = args.tpu_name or config.get("tpu_name")
    zone = args.tpu_zone or config.get("tpu_zone")
    if not name or not zone:
        raise LaunchError("Which pod? Give --tpu_name and --tpu_zone, or put them into the configuration file.")
    commands = _commands(args, config)
    if args.install_accelerate:
        version = args.accelerate_version
        if version != "latest" and not re.fullmatch(r"\d[\w.]*", version):  # a shell of the pod reads it
            raise LaunchError(f"--accelerate_version is {version!r}; write latest, or the number of a release.")
        requirement = "accelerate -U" if version == "latest" else f"accelerate=={version}"
        commands = [f"pip install {requirement}", *commands]
    if not commands:
        raise LaunchError("Nothing to run. Give --command or --command_file, or --install_accelerate.")
    return gcloud_ssh(str(name), str(zone), "; ".join(["cd /usr/share", *commands]), alpha=args.use_alpha)


def _commands(args: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    if args.command:
        lines = []
        for words in args.command:
            # `--command "echo a" "echo b"` are two commands; `--command echo a` is one that was not quoted.
            lines += words if any(" " in word for word in words) else [" ".join(words)]
        return lines
    file = args.command_file or config.get("command_file")
    if file:
        try:
            text = pathlib.Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"The command file {str(file)!r} cannot be read: {error}.") from None
        # They become one line, in which a comment would hide what follows.
        return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    commands = config.get("commands") or []
    return [commands] if isinstance(commands, str) else [str(command) for command in commands]


def main() -> None:
    """Run `accelerate tpu-config` as a separate program; exit statuses are those of `console`."""
    console(tpu_command_parser().parse_args())
