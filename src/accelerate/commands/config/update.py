"""`accelerate config update`: an old configuration file in today's shape."""

import argparse
import os
import pathlib
from typing import Any

from accelerate.commands.config import store
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.commands.utils import make_parser
from accelerate.config.options import SECTIONS
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError


def update_config(args: argparse.Namespace) -> str:
    """Rewrite a configuration file: old spellings are replaced, and settings that it lacks are added with their defaults.

    The old file is kept beside it as `FILE.bak`, with its comments. A file that is in today's shape already is left alone.

    Args:
        args: has `config_file`; None is the default file.

    Returns:
        The file.

    Raises:
        LaunchError: there is no such file, or it holds an unknown key, or a value that is none; it is left alone.
    """
    path = default_config_file if args.config_file is None else args.config_file
    _update(path)
    return str(path)


def _update(path: str) -> tuple[pathlib.Path | None, tuple[str, ...]]:
    """Rewrite a file; return the backup, None if nothing changed, and what was replaced."""
    if not os.path.exists(path):
        raise LaunchError(f"There is no configuration file {str(path)!r} to update.")
    config = load_config_from_file(path)
    found = files.inspect(pathlib.Path(path))
    fatal = [problem.text for problem in found.problems if problem.fatal]
    if fatal:
        raise LaunchError(f"The configuration file {path} was left alone: {' '.join(fatal[:5])}")
    today = files.full_keys(config.to_dict())
    for section in SECTIONS:
        if hasattr(config, section):
            setattr(config, section, today.get(section))
    if config.to_dict() == files.load_mapping(path):
        return None, ()
    backup = store.back_up(path)
    config.save(path)
    return backup, (*found.notes, *(problem.text for problem in found.problems))


def update_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config update`.

    Args:
        parser: what `ArgumentParser.add_subparsers` returned.
        parents: parsers whose arguments it shares.
    """
    command = make_parser(
        "update",
        "Bring a configuration file into today's shape; the old one is kept as FILE.bak.",
        parser,
        update_config_command,
        parents=parents,
        formatter_class=SubcommandHelpFormatter,
    )
    command.add_argument(
        "--config_file", help="The file to rewrite; by default the one that `accelerate launch` reads."
    )
    return command


def update_config_command(args: argparse.Namespace) -> None:
    """Run `accelerate config update`.

    Args:
        args: what `update_command_parser` parsed.

    Raises:
        LaunchError: as `update_config`.
    """
    path = default_config_file if args.config_file is None else args.config_file
    backup, notes = _update(path)
    for note in notes:
        print(f"note: {note}")
    if backup is None:
        print(f"{path} is in today's shape already; it stays as it is.")
    else:
        print(f"Updated {path}. The old file, with its comments, is {backup}.")
