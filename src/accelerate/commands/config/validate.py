"""`accelerate config validate`: everything that is wrong with a configuration file."""

import argparse
import sys
from typing import Any

from accelerate.commands.config.config_utils import add_command
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError


def validate_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config validate`.

    Args:
        parser: what `ArgumentParser.add_subparsers` returned.
        parents: parsers whose arguments it shares.
    """
    text = "Say everything that is wrong with a configuration file, with line numbers; the exit status is 2 if anything is."
    command = add_command(parser, parents, "validate", text, validate_command)
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

    if args.file is not None and args.config_file is not None:
        raise LaunchError("Name one file: either FILE or --config_file FILE.")
    path = files.find_required(args.config_file if args.file is None else args.file)
    problems, notes = rules.check(files.inspect(path))
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
