"""What the commands share: their parser, and how they answer errors."""

import argparse
import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from accelerate.launch.errors import RunError
from accelerate.launch.option import ArgumentGroup, Parser

T = TypeVar("T")

# Exit statuses, as shells count them.
INTERRUPTED = 130
CLOSED_PIPE = 141

# Set while a shell asks for completions.
COMPLETING = "_ARGCOMPLETE"

# The system's words for a path that cannot be used; every other error of the system is an error of the run.
PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


class CustomArgumentGroup(ArgumentGroup):
    """A heading of a `CustomArgumentParser`."""


class CustomArgumentParser(Parser):
    """A parser that takes long flags with underscores and with hyphens, and remembers which arguments were given.

    It completes words for a shell, where argcomplete is installed.
    """

    group_class = CustomArgumentGroup

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the command line, or answer a shell that asks how a word of it goes on."""
        if args is None and COMPLETING in os.environ:
            from accelerate.commands.accelerate_cli import complete  # only a shell needs it

            complete(self)
        return super().parse_args(args, namespace)


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
    """Return the parser of a command, alone or as a part of `subparsers`; `func` becomes `args.func`."""
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


@contextlib.contextmanager
def as_program(prog: str) -> Iterator[None]:
    """End as a console program does: quietly with status 141 where the output has no reader, with 130 after Ctrl-C.

    What the encoding of the output lacks, such as letters of a path, is written as an escape sequence.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Python flushes the output once more at exit, where nothing reads it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(CLOSED_PIPE) from None


def or_exit(prog: str, func: Callable[..., T], *args: Any) -> T:
    """Call a function; a request that cannot be run becomes one line on stderr and exit status 2.

    What the system refuses on the way (a full disk, a connection), and a `RunError`, becomes one line and status 1.
    """
    try:
        with as_program(prog):
            return func(*args)
    except RunError as error:
        problem, status = error, error.status
    except (ValueError, NotImplementedError, OSError) as error:
        problem, status = error, 2 if isinstance(error, (ValueError, NotImplementedError, *PATH_ERRORS)) else 1
    print(f"{prog}: error: {_in_words(problem)}", file=sys.stderr)
    raise SystemExit(status)


def brief(error: BaseException) -> str:
    """Return what an error says, in one line of moderate length; libraries go on for paragraphs."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fspath(error.filename)!r}: {error.strerror}."
    return str(error) or type(error).__name__
