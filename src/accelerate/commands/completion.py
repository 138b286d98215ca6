"""Completion of command lines in a shell, through argcomplete, which is optional.

`eval "$(register-python-argcomplete accelerate)"` in the shell's start file switches it on. While the shell asks, argcomplete's
variable is in the environment; nothing here is imported otherwise.
"""

import argparse
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from accelerate.commands.utils import CustomArgumentParser
from accelerate.config.options import BY_NAME

if TYPE_CHECKING:
    from accelerate.commands.accelerate_cli import Command


def answer(parser: argparse.ArgumentParser) -> None:
    """Answer the shell how the word under the cursor may go on, and end the process.

    One spelling of each option is offered: the one with underscores, unless the word has hyphens already. After a script, whose
    options follow, none is. What has no words of its own is completed by the names of files.

    Args:
        parser: the parser of the program that is being typed.

    Raises:
        SystemExit: argcomplete is not installed.
    """
    try:
        import argcomplete
    except ImportError:
        raise SystemExit(1) from None  # the shell would show an error in the middle of the line
    *words, word = os.environ.get("COMP_LINE", "").split(" ")
    over = any(each.endswith(".py") for each in words)
    unwanted = []
    for action in _actions(parser):
        unwanted += [flag for flag in action.option_strings if over or ("-" in flag[2:]) != ("-" in word[2:])]
        if words_of := getattr(BY_NAME.get(action.dest), "words", None):
            action.completer = argcomplete.ChoicesCompleter(words_of)
    argcomplete.autocomplete(parser, always_complete_options=False, exclude=unwanted)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _actions(inner)


def parser_of_all(commands: "Mapping[str, Command]") -> argparse.ArgumentParser:
    """Return the parser of `accelerate` with all its commands.

    Args:
        commands: name to row.
    """
    parser = CustomArgumentParser("accelerate", allow_abbrev=False)
    subparsers = parser.add_subparsers()
    for row in commands.values():
        getattr(importlib.import_module(f"accelerate.commands.{row.module}"), row.parser)(subparsers)
    return parser
