"""`accelerate config update`: an old configuration file in today's shape."""

import argparse
import os
import pathlib
from typing import Any

from accelerate.base import _lazy
from accelerate.extensions.configure import config_utils
from accelerate.extensions.configure.config_args import config_of
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError

__getattr__ = _lazy.aliases("accelerate.commands.config.update")

description = "Convert an old configuration file to the current format; the old one is kept as FILE.bak."


def update_config(args: argparse.Namespace) -> str:
    """Rewrite a configuration file: replace old spellings, and add missing settings with their defaults.

    The old file is kept next to it as `FILE.bak`, with its comments. A file in the current format is not changed.

    Args:
        args: has `config_file`; None is the default file.

    Returns:
        The file.

    Raises:
        LaunchError: there is no such file, or it holds an unknown key or an invalid value; it is not changed.
        FileNotFoundError: it is a folder.
    """
    try:
        files.find(args.config_file)
    except FileNotFoundError as error:
        if os.path.isdir(args.config_file):
            raise
        raise LaunchError(str(error)) from None
    path = config_utils.find_required(args.config_file)
    _update(path)
    return str(path)


def _update(path: pathlib.Path) -> tuple[pathlib.Path | None, tuple[str, ...]]:
    """Rewrite a file; return the backup (None if nothing changed) and the replaced settings."""
    settings = files.inspect(path)
    fatal = [problem.text for problem in settings.problems if problem.fatal]
    if fatal:
        raise LaunchError(f"The configuration file {path} was not changed: {' '.join(fatal[:5])}")
    config = config_of(settings.content, path)
    if config.to_dict() == files.load_mapping(path):
        return None, ()
    backup = config_utils.back_up(path)
    config.save(path)
    return backup, (*settings.notes, *(problem.text for problem in settings.problems))


def update_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config update` to what `ArgumentParser.add_subparsers` returned."""
    command = config_utils.add_command(parser, parents, "update", description, update_config_command)
    text = "The file to rewrite; by default the one that `accelerate launch` reads."
    command.add_argument("--config_file", help=text)
    return command


def update_config_command(args: argparse.Namespace) -> None:
    """Run `accelerate config update`; raises as `update_config`."""
    path = config_utils.find_required(args.config_file)
    backup, notes = _update(path)
    for note in notes:
        print(f"note: {note}")
    if backup is None:
        print(f"{path} is already in the current format; it was not changed.")
    else:
        print(f"Updated {path}. The old file, with its comments, is {backup}.")
