"""What the commands share: their parser, and how they answer errors."""

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.launch.option import ArgumentGroup, Parser

T = TypeVar("T")


class CustomArgumentParser(Parser):
    """A parser that takes long flags with underscores and with hyphens, and remembers which arguments were given."""


class CustomArgumentGroup(ArgumentGroup):
    """A heading of a `CustomArgumentParser`."""


class OneSpelling(argparse.HelpFormatter):
    """Shows the spelling with underscores only; the one with hyphens works as well."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = copy.copy(action)
        shown.option_strings = [flag for flag in action.option_strings if "-" not in flag[2:]]
        return super()._format_action_invocation(shown)


def make_parser(
    name: str, description: str, subparsers: Any = None, func: Callable[..., Any] | None = None, **options: Any
) -> CustomArgumentParser:
    """Return the parser of a command, alone or as a part of another parser.

    Args:
        name: the command.
        description: what it does, in one sentence.
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
        func: what runs the command; it becomes `args.func`.
        options: further arguments of `argparse.ArgumentParser`.
    """
    if subparsers is None:
        options.setdefault("formatter_class", OneSpelling)
        parser = CustomArgumentParser(f"accelerate {name}", description=description, **options)
    else:
        parser = subparsers.add_parser(name, help=description, description=description, **options)
        if not isinstance(parser, Parser):
            parser.__class__ = CustomArgumentParser  # the caller's parser class decides otherwise
    if func is not None:
        parser.set_defaults(func=func)
    return parser


def or_exit(prog: str, func: Callable[..., T], *args: Any) -> T:
    """Call a function; a request that cannot be run becomes one line on stderr and exit status 2.

    Args:
        prog: the command, for the message.
        func: the function.
        args: its arguments.

    Raises:
        SystemExit: the function raised `ValueError` (as `LaunchError` is), `NotImplementedError` or `FileNotFoundError`.
    """
    try:
        return func(*args)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
