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

# The files that an argument takes, by its name: endings, or none for any file.
_FILES: dict[str, tuple[str, ...]] = {
    "training_script": ("py",),
    "deepspeed_config_file": ("json",),
    **dict.fromkeys(("config_file", "save_location", "output_file", "file"), ("yaml", "yml", "json")),
    **dict.fromkeys(("training_script_args", "deepspeed_hostfile", "mpirun_hostfile", "command_file"), ()),
    **dict.fromkeys(("log_dir", "checkpoint_directory", "output_path", "folder", "checkpoint", "model_name"), ()),
}


def answer(parser: argparse.ArgumentParser) -> None:
    """Answer the shell how the word under the cursor may go on, and end the process.

    One spelling of each option is offered: the one with underscores, unless the word has hyphens already. After a script, whose
    options follow, none is.

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
        if action.dest in _FILES:
            action.completer = argcomplete.FilesCompleter(_FILES[action.dest])
        elif words_of := getattr(BY_NAME.get(action.dest), "words", None):
            action.completer = argcomplete.ChoicesCompleter(words_of)
    nothing = argcomplete.SuppressCompleter()
    argcomplete.autocomplete(parser, always_complete_options=False, exclude=unwanted, default_completer=nothing)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _actions(inner)


def parser_of_all(commands: "Mapping[str, Command]") -> argparse.ArgumentParser:
    """Return the parser of `accelerate`, where only the command that stands on the line has its arguments.

    Args:
        commands: name to row.
    """
    parser = CustomArgumentParser("accelerate", allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    subparsers = parser.add_subparsers()
    words = os.environ.get("COMP_LINE", "").split()
    typed = next((word for word in words[1:] if not word.startswith("-")), None)
    for name, row in commands.items():
        if name == typed:
            getattr(importlib.import_module(f"accelerate.commands.{row.module}"), row.parser)(subparsers)
        else:
            subparsers.add_parser(name, help=row.help)
    return parser
