"""The console script `accelerate`, which imports only the command that it runs."""

import argparse
import importlib
import sys
from functools import cache
from typing import Any, NoReturn

from accelerate import __version__
from accelerate.base import _lazy
from accelerate.commands.utils import CustomArgumentParser, as_program, or_exit
from accelerate.extension import Command, all_specs
from accelerate.launch.config_file import nearest

__getattr__ = _lazy.aliases(__name__)


_LAUNCH = Command(
    "accelerate.commands.launch", "launch_command_parser", "Start a training script, in one process or several."
)


@cache
def commands() -> dict[str, Command]:
    """Return `launch` and the commands of all extensions, by name."""
    rows = {"launch": _LAUNCH}
    for spec in all_specs():
        rows.update(spec.commands)
    return dict(sorted(rows.items()))


def parser_of(name: str, *subparsers: Any) -> argparse.ArgumentParser:
    """Return the parser of a command, or add it to what ``add_subparsers`` returned."""
    command = commands()[name]
    return getattr(importlib.import_module(command.module), command.parser)(*subparsers)


def main() -> None:
    """Run the command that the command line names; status 2 if it cannot be run, 1 without a command, else that of the command."""
    with as_program("accelerate"):
        name, *rest = sys.argv[1:] or [None]
        command = _LAUNCH if name == "launch" else commands().get(name)
        if command is None:
            _without_command(name)
        _run(command, f"accelerate {name}", rest)


def _run(command: Command, prog: str, words: list[str]) -> None:
    module = importlib.import_module(command.module)
    args = getattr(module, command.parser)().parse_args(words)
    if hasattr(module, "console"):  # it starts programs, whose output is theirs
        module.console(args)
    else:
        or_exit(prog, args.func, args)


def _without_command(word: str | None) -> NoReturn:
    """Answer a command line that does not begin with a command."""
    rows = commands()
    width = max(map(len, rows)) + 2
    parser = CustomArgumentParser(
        "accelerate",
        usage="accelerate <command> [<args>]",
        description="\n".join(["commands:", *(f"  {name:{width}}{command.help}" for name, command in rows.items())]),
        epilog="`accelerate <command> --help` lists the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"accelerate {__version__}")
    if word is None:
        parser.print_help()
        raise SystemExit(1)
    if word in ("-h", "--help", "-V", "--version"):
        parser.parse_args([word])
    if word.endswith(".py"):
        parser.error(f"{word!r} is no command; did you mean `accelerate launch {word}`?")
    near = nearest(word.lower().replace("_", "-"), rows)
    hint = f"did you mean {near}?" if near else f"choose one of {', '.join(rows)}."
    parser.error(f"{word!r} is no command; {hint}")


if __name__ == "__main__":
    main()
