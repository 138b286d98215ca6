"""Completion of command lines in a shell, through argcomplete, which is optional.

`eval "$(register-python-argcomplete accelerate)"` in the shell's start file switches it on. While the shell asks, argcomplete's
variable is in the environment; nothing here is imported otherwise.
"""

import argparse
import contextlib
import glob
import importlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from accelerate.commands.utils import CustomArgumentParser
from accelerate.config.options import BY_NAME

if TYPE_CHECKING:
    from accelerate.commands.accelerate_cli import Command

# What the values of an argument without choices look like, by its name: endings of files (folders in any case), or words.
_CONFIGS = (".yaml", ".yml", ".json")
_FILES: dict[str, tuple[str, ...]] = {
    "training_script": (".py",),
    "deepspeed_config_file": (".json",),
    **dict.fromkeys(("config_file", "save_location", "output_file", "file"), _CONFIGS),
    **dict.fromkeys(("training_script_args", "deepspeed_hostfile", "mpirun_hostfile", "command_file"), ("",)),
    **dict.fromkeys(("log_dir", "checkpoint_directory", "output_path", "folder", "checkpoint", "model_name"), ()),
    **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"), ()),
}
# Beside the words of the option table.
_WORDS: dict[str, Iterable[str]] = {
    "tee": ("0", "1", "2", "3"),
    "gpu_ids": ("all",),
    "parallelism_config_sp_attn_implementation": ("eager", "flash_attention_2", "flash_attention_3", "sdpa"),
}


def answer(parser: argparse.ArgumentParser) -> None:
    """Answer the shell how the word under the cursor may go on, and end the process.

    Args:
        parser: the parser of the program that is being typed.

    Raises:
        SystemExit: argcomplete is not installed.
    """
    try:
        import argcomplete
    except ImportError:
        raise SystemExit(1) from None  # the shell would show an error in the middle of the line
    line = os.environ.get("COMP_LINE", "")
    *words, word = line.split(" ")
    unwanted = list(_unwanted(parser, [each for each in words[1:] if each], word))
    describe_values(parser)
    argcomplete.autocomplete(parser, always_complete_options=False, exclude=unwanted)


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


def describe_values(parser: argparse.ArgumentParser) -> None:
    """Give every argument of a parser, and of its subcommands, the completions of its values.

    Args:
        parser: the parser; its actions are changed in place.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                describe_values(inner)
        elif action.choices is None and action.nargs != 0:
            action.completer = _completer(action)


def _completer(action: argparse.Action) -> Callable[..., Iterable[str]]:
    words = _WORDS.get(action.dest) or getattr(BY_NAME.get(action.dest), "words", None)
    if words:
        return lambda prefix, **_: words
    if action.dest in _FILES:
        return lambda prefix, **_: list(_paths(prefix, _FILES[action.dest]))
    if "true or false" in (action.help or "") or str(action.default) in ("true", "false"):
        return lambda prefix, **_: ("true", "false")
    return lambda prefix, **_: ()


def _paths(prefix: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the folders, and the files with one of the endings, whose paths begin with what was typed."""
    start = os.path.expanduser(prefix)
    for path in sorted(glob.glob(f"{glob.escape(start)}*")):
        word = prefix + path.removeprefix(start)
        if os.path.isdir(path):
            yield f"{word}/"
        elif endings and path.endswith(endings):
            yield word


def _unwanted(parser: argparse.ArgumentParser, words: list[str], word: str) -> Iterator[str]:
    """Yield the options that are not to be offered.

    They are one spelling of each (the one with hyphens, unless that is how the word begins), and all where the script stands on the
    line already: what follows is for the script.
    """
    unwanted, wanted = ("_", "-") if "-" in word[2:] else ("-", "_")
    over = _has_script(parser, words)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _unwanted(inner, words[words.index(name) + 1 :] if name in words else [], word)
        for flag in action.option_strings:
            twin = flag[:2] + flag[2:].replace(unwanted, wanted)
            if over or (twin != flag and twin in action.option_strings):
                yield flag


def _has_script(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    """Whether the words hold the script of a launch."""
    if not any(action.nargs == argparse.REMAINDER for action in parser._actions):
        return False
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            parser.parse_known_args(words)
        except SystemExit:  # it is missing
            return False
    return True
