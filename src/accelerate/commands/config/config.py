"""`accelerate config` without a subcommand: the interview."""

import argparse
import os
import sys
from typing import Any

from accelerate.commands.utils import make_parser, or_exit
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError

# What a shell reports for a process that Ctrl-C has ended.
INTERRUPTED = 130


def get_user_input() -> Any:
    """Ask for all settings.

    Returns:
        A `ClusterConfig`, or a `SageMakerConfig` for jobs on Amazon SageMaker.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return _ask_all(None)


def _ask_all(before: files.Inspection | None) -> Any:
    from accelerate.commands.config.interview import Asker  # not for --help

    asker = Asker()
    content = before.content if before else {}
    was = str(content.get("compute_environment", "")) == "AMAZON_SAGEMAKER"
    values = dict(before.settings.values) if before else {}
    if asker.choose("Where should the training run?", ["Machines of your own", "Amazon SageMaker"], int(was)) == 0:
        from accelerate.commands.config.cluster import ask_cluster

        return ask_cluster(asker, {} if was else values, None if was else content.get("distributed_type"))
    from accelerate.commands.config.sagemaker import ask_sagemaker

    plain = {key: value for key, value in content.items() if not isinstance(value, dict)}
    return ask_sagemaker(asker, {**plain, **values} if was else {})


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config`, without its subcommands.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "config",
        "Write a configuration file for `accelerate launch` by answering questions.",
        subparsers,
        config_command,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config_file",
        help="The file to write; by default the one that `accelerate launch` looks for. If it exists, it gives the defaults.",
    )
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask for all settings and write them; nothing is written before the last answer.

    Args:
        args: what `config_command_parser` parsed.

    Raises:
        LaunchError: the file cannot be written, or the input ended too early.
        SystemExit: with status 130 after Ctrl-C.
    """
    from accelerate.commands.config import store  # not for --help

    path = files.default_path() if args.config_file is None else args.config_file
    store.check_writable(path)
    before = _previous(path)
    try:
        config = _ask_all(before)
    except KeyboardInterrupt:
        print("\naccelerate config: stopped; nothing was written.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except EOFError:
        print(file=sys.stderr)
        raise LaunchError("The input ended before the last question was answered; nothing was written.") from None
    if os.path.exists(path) and (before is None or before.problems):
        print(f"The old file is kept at {store.back_up(path)}.")
    config.save(path)
    shown = "" if os.path.abspath(path) == os.path.abspath(files.default_path()) else f"--config_file {path} "
    print(f"Wrote {path}. `accelerate launch {shown}SCRIPT` runs with it.")


def _previous(path: str) -> files.Inspection | None:
    if not os.path.exists(path):
        return None
    try:
        found = files.inspect(path)
    except LaunchError as error:
        print(f"{error} It is replaced at the end, and kept as a backup.")
        return None
    if found.problems:
        print(f"{path} has faults, which `accelerate config validate {path}` lists.")
    print(f"{path} exists: its settings are the defaults, and it is replaced at the end.")
    return found


def main() -> None:
    """Hold the interview as a program of its own.

    Raises:
        SystemExit: as in `accelerate.commands.config.main`.
    """
    or_exit("accelerate config", config_command, config_command_parser().parse_args())


if __name__ == "__main__":
    main()
