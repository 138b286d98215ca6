"""Helpers of the subcommands of `accelerate config`: their parsers, and atomic writes of files."""

import argparse
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.base import _lazy
from accelerate.commands.utils import CustomArgumentParser, make_parser
from accelerate.config.options import DYNAMO_WORDS
from accelerate.launch.config_file import default_path, find
from accelerate.launch.errors import LaunchError
from accelerate.runtime.durable import written_whole

__getattr__ = _lazy.aliases("accelerate.commands.config.config_utils")

Path = str | os.PathLike[str]

DYNAMO_BACKENDS = [word.upper() for word in DYNAMO_WORDS.split() if word != "no"]


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints the usage of a subcommand without the placeholder that stands for the choice among subcommands."""

    __module__ = "accelerate.commands.config.config_utils"

    def _format_usage(self, usage: str | None, actions: object, groups: object, prefix: str | None) -> str:
        return super()._format_usage(usage, actions, groups, prefix).replace("<command> [<args>] ", "")


def add_command(
    commands: Any, parents: list[argparse.ArgumentParser], name: str, description: str, func: Callable[..., Any]
) -> CustomArgumentParser:
    """Add a subcommand of `accelerate config` to what `ArgumentParser.add_subparsers` returned."""
    return make_parser(name, description, commands, func, parents=parents, formatter_class=SubcommandHelpFormatter)


# Files


def find_required(given: Path | None) -> pathlib.Path:
    """Return the file given, else the default one, which has to exist."""
    path = find(given)
    if path is None:
        raise FileNotFoundError(f"There is no file {default_path()!r}. Write one with `accelerate config default`.")
    return path


def check_writable(path: Path) -> None:
    """Refuse, with a LaunchError, a path that cannot be written to, before it is requested."""
    if not os.fspath(path):
        raise LaunchError("--config_file is ''; name a file, or leave the option out for the default one.")
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise LaunchError(f"{path} is a folder or a device; name a file, such as {path / 'default_config.yaml'}.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise LaunchError(f"{path} cannot be written: {above} is no folder that you may write to.")


def write(path: Path, content: Mapping[str, Any], as_json: bool | None = None) -> None:
    """Replace a file, or make it and its folder: a reader sees the old content or the new one, never a part.

    A link stays a link, and an existing file keeps its permissions. Without `as_json` the ending `.json` decides.
    """
    if str(path).endswith(".json") if as_json is None else as_json:
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    else:
        import yaml  # not for commands that write no file

        text = yaml.safe_dump(dict(content), allow_unicode=True)
    target = pathlib.Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as temporary:
            pathlib.Path(temporary).write_text(text, "utf-8", newline="\n")
            if target.exists():
                shutil.copymode(target, temporary)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror or error}.") from None


def back_up(path: Path) -> pathlib.Path:
    """Copy a file to `FILE.bak`, or `FILE.bak2` and so on, and return the copy; existing backups are kept."""
    source = pathlib.Path(os.path.realpath(path))
    numbers = itertools.chain([""], itertools.count(2))
    copies = (source.with_name(f"{source.name}.bak{number}") for number in numbers)
    copy = next(copy for copy in copies if not os.path.lexists(copy))
    try:
        shutil.copy(source, copy)
    except OSError as error:
        raise LaunchError(f"{copy} cannot be written: {error.strerror or error}.") from None
    return copy
