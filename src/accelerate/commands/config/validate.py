"""`accelerate config validate`: everything that is wrong with a configuration file."""

import argparse
import pathlib
import sys
from typing import Any

from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.commands.utils import make_parser
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError


def validate_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config validate`.

    Args:
        parser: what `ArgumentParser.add_subparsers` returned.
        parents: parsers whose arguments it shares.
    """
    command = make_parser(
        "validate",
        "Say everything that is wrong with a configuration file, with line numbers; the exit status is 2 if anything is.",
        parser,
        validate_command,
        parents=parents,
        formatter_class=SubcommandHelpFormatter,
    )
    command.add_argument("file", nargs="?", help="The file; by default the one that `accelerate launch` reads.")
    command.add_argument("--config_file", help="Another way to name it.")
    return command


def validate_command(args: argparse.Namespace) -> None:
    """Run `accelerate config validate`.

    Args:
        args: what `validate_command_parser` parsed.

    Raises:
        LaunchError: the file cannot be read at all, or two were named.
        FileNotFoundError: there is no such file.
        SystemExit: with status 2 if something is wrong with it.
    """
    from accelerate.commands.config import rules  # not for --help

    named = [name for name in (args.file, args.config_file) if name is not None]
    if len(named) > 1:
        raise LaunchError("Name one file: either FILE or --config_file FILE.")
    path = pathlib.Path(*named or [files.default_path()])
    if "" in named or not path.exists():
        shown = "" if "" in named else str(path)
        raise FileNotFoundError(f"There is no configuration file {shown!r}. Write one with `accelerate config`.")
    found = files.inspect(path)
    problems, notes = rules.check(found)
    for problem in problems:
        place = f"{path}:{problem.line}" if problem.line else str(path)
        print(f"{place}: {problem.text}", file=sys.stderr)
    for note in notes:
        print(f"{path}: note: {note}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        print(f"{path}: {count} found.", file=sys.stderr)
        raise SystemExit(2)
    print(f"{path}: no problem found.")
