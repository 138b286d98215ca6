"""`accelerate config` without a subcommand: the interview."""

import argparse
import os
import pathlib
import sys
from typing import Any

from accelerate.commands.config import config_utils
from accelerate.commands.config.interview import Asker
from accelerate.commands.utils import make_parser, or_exit
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError


def get_user_input() -> Any:
    """Ask for all settings.

    Returns:
        A `ClusterConfig`, or a `SageMakerConfig` for jobs on Amazon SageMaker.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return _ask(None)


def _ask(before: files.Inspection | None) -> Any:
    """Ask for all settings; those of the file that is replaced are the defaults."""
    asker = Asker()
    content, values = (before.content, before.settings.values) if before else ({}, {})
    was = str(content.get("compute_environment")) == "AMAZON_SAGEMAKER"
    if asker.choose("Where should the training run?", ["Machines of your own", "Amazon SageMaker"], int(was)) == 1:
        from accelerate.commands.config.sagemaker import ask_sagemaker

        plain = {key: value for key, value in content.items() if not isinstance(value, dict)}
        return ask_sagemaker(asker, {**plain, **values} if was else {})
    from accelerate.commands.config.cluster import ask_cluster

    return ask_cluster(asker, {} if was else values, None if was else content.get("distributed_type"))


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config`, without its subcommands.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    text = "Write a configuration file for `accelerate launch` by answering questions."
    parser = make_parser("config", text, subparsers, config_command, allow_abbrev=False)
    text = "The file to write; by default the one that `accelerate launch` looks for. If it exists, it gives the defaults."
    parser.add_argument("--config_file", help=text)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask for all settings and write them; nothing is written before the last answer.

    Args:
        args: what `config_command_parser` parsed.

    Raises:
        LaunchError: the file is there and cannot be read, or it cannot be written, or the input ended too early.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    default = files.default_path()
    path = default if args.config_file is None else args.config_file
    config_utils.check_writable(path)
    before = files.inspect(pathlib.Path(path)) if os.path.exists(path) else None
    if before:
        print(f"{path} exists: its settings are the defaults, and it is replaced at the end.")
    try:
        config = _ask(before)
    except EOFError:
        print(file=sys.stderr)
        raise LaunchError("The input ended before the last question was answered; nothing was written.") from None
    config.save(path)
    shown = "" if os.path.abspath(path) == os.path.abspath(default) else f"--config_file {path} "
    print(f"Wrote {path}. `accelerate launch {shown}SCRIPT` runs with it.")


def main() -> None:
    """Hold the interview as a program of its own.

    Raises:
        SystemExit: as in `accelerate.commands.config.main`.
    """
    or_exit("accelerate config", config_command, config_command_parser().parse_args())


if __name__ == "__main__":
    main()
