"""Helpers of the commands: their parser, which takes rows of the option table, and their error messages."""

import argparse
import contextlib
import copy
import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from accelerate.base import _lazy
from accelerate.base._warn import printable
from accelerate.config.options import OPTIONS, Option
from accelerate.config.options.schema import both_spellings
from accelerate.launch.config_file import nearest
from accelerate.launch.errors import RunError

__getattr__ = _lazy.aliases(__name__)

T = TypeVar("T")

# The system's words for a path that cannot be used; every other error of the system is an error of the run.
PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)

# Stands for an argument that was not given. A list, because argparse appends repeated arguments to a copy of it.
_NOT_GIVEN: list[Any] = []


class _SpelledTwice(argparse._ActionsContainer):
    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument under both spellings of its long flags; see `argparse.ArgumentParser.add_argument`."""
        return super().add_argument(*both_spellings(args), **kwargs)


class CustomArgumentGroup(_SpelledTwice, argparse._ArgumentGroup):
    """A heading of a `CustomArgumentParser`."""


class CustomArgumentParser(_SpelledTwice, argparse.ArgumentParser):
    """A parser that takes long flags with underscores and with hyphens, and remembers which arguments were passed.

    Parsed arguments carry `nondefault`, the names of all arguments on the command line, so that resolution can distinguish
    a choice from a default of the same value.
    """

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """Add a heading whose arguments are spelled both ways too."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the command line; an unknown option is answered by the parser of its subcommand."""
        words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            parser = self._innermost(words)
            parser.error(parser.unknown(unknown))
        return parsed

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the known arguments, and note the names of those passed in `nondefault`."""
        if namespace is not None:
            return super().parse_known_args(args, namespace)
        # argparse assigns a default only to a missing attribute: what still holds the mark afterwards was not given.
        actions = {action.dest: action for action in self._actions}
        marked = [name for name, action in actions.items() if action.default is not argparse.SUPPRESS]
        parsed, rest = super().parse_known_args(args, argparse.Namespace(**dict.fromkeys(marked, _NOT_GIVEN)))
        passed = {name for name in actions if getattr(parsed, name, _NOT_GIVEN) is not _NOT_GIVEN}
        for name in set(marked) - passed:
            action, default = actions[name], actions[name].default
            is_row = isinstance(action.type, functools.partial)  # the defaults of the table are values, not text
            if isinstance(default, str) and not is_row:
                default = self._get_value(action, default)
            setattr(parsed, name, default)
        # The parser of a sub-command has noted its own.
        parsed.nondefault = passed | set(getattr(parsed, "nondefault", ()))
        return parsed, rest

    def unknown(self, words: Sequence[str]) -> str:
        """Return one line about words that no argument takes: each unknown option with the nearest one that exists."""
        flags = [word.partition("=")[0] for word in words if word.startswith("-") and word not in ("-", "--")]
        if not flags:
            return f"{' '.join(words)} is not expected here."
        return " ".join(self._correction(flag) for flag in dict.fromkeys(flags))

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error on stderr, and end with status 2."""
        super().error(message.replace(", training_script_args", ""))  # may be empty, whatever argparse says

    def _innermost(self, words: Sequence[str]) -> "CustomArgumentParser":
        """Return the parser of the subcommand that was chosen, or this one."""
        for position, word in enumerate(words):
            for action in self._actions:
                inner = action.choices.get(word) if isinstance(action, argparse._SubParsersAction) else None
                if isinstance(inner, CustomArgumentParser):
                    return inner._innermost(words[position + 1 :])
        return self

    def _correction(self, flag: str) -> str:
        spellings = {spelling.replace("-", "_"): spelling for spelling in reversed(self._option_string_actions)}
        near = nearest(flag.lower().replace("-", "_"), spellings)
        hint = f"did you mean {spellings[near]}?" if near else f"`{self.prog} --help` lists the options."
        return f"{flag} is unknown; {hint}"


def add_options(parser: CustomArgumentParser, options: Iterable[Option] = OPTIONS) -> None:
    """Add rows of the option table to a parser, under their headings; a row without flags is for files only."""
    headings = {heading.title: heading for heading in parser._action_groups}
    for option in options:
        if not option.spellings:
            continue
        heading = headings.get(option.group)
        if heading is None:
            # argparse's own heading, because the table spells its flags both ways already.
            heading = headings[option.group] = argparse.ArgumentParser.add_argument_group(parser, option.group)
        common = {"dest": option.name, "default": option.default}
        kind: dict[str, Any] = {"type": functools.partial(_read, option), "choices": option.choices}
        if option.switch:
            kind = {"action": "store_true"}
        elif option.type == "strs":
            kind = {"action": "append"}
        # argparse lists choices itself.
        listed = ", ".join(() if option.choices or option.allow_other else option.words)
        text = f"{option.help[:-1]}: {listed}." if listed else option.help
        heading.add_argument(*option.spellings, help=text.replace("%", "%%"), **common, **kind)
        if option.negation:
            opposite = f"The opposite of {option.spellings[0]}."
            heading.add_argument(*both_spellings([option.negation]), action="store_false", help=opposite, **common)


def _read(option: Option, text: str) -> Any:
    """Read the value of a flag; argparse calls it."""
    if text.lower() in option.unset:  # it cannot undo a value of a lower layer
        raise argparse.ArgumentTypeError(f"{option.name} is {text!r}; leave the option out for that.")
    try:
        return option.parse(text)
    except ValueError as error:
        if option.choices is not None:
            return text  # argparse lists the choices
        raise argparse.ArgumentTypeError(str(error)) from None


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
    """Return the parser of a command, separate or as a part of `subparsers`; `func` becomes `args.func`."""
    if subparsers is None:
        options.setdefault("formatter_class", OneSpelling)
        parser = CustomArgumentParser(f"accelerate {name}", description=description, **options)
    else:
        parser = subparsers.add_parser(name, help=description, description=description, **options)
        if not isinstance(parser, CustomArgumentParser):
            parser.__class__ = CustomArgumentParser  # the caller's parser class decides otherwise
    if func is not None:
        parser.set_defaults(func=func)
    return parser


class _Printable:
    """Standard output on which control characters come out as escape sequences, whatever file or process they are from."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, see `printable`."""
        return self._stream.write(printable(text))


@contextlib.contextmanager
def as_program(prog: str) -> Iterator[None]:
    """End as a console program does: quietly with status 141 where the output has no reader, with 130 after Ctrl-C.

    Characters that the encoding of the output lacks, such as letters of a path, are written as escape sequences.
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
        raise SystemExit(130) from None
    except BrokenPipeError:
        # Python flushes the output once more at exit, where nothing reads it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None


def or_exit(prog: str, func: Callable[..., T], *args: Any) -> T:
    """Call a function; turn a request that cannot be run into one line on stderr and exit status 2.

    Errors of the system (a full disk, a connection) and a `RunError` become one line and status 1. Control characters are
    written as escape sequences: names in files may steer a terminal.
    """
    try:
        with as_program(prog), contextlib.redirect_stdout(sys.stdout and _Printable(sys.stdout)):
            return func(*args)
    except RunError as error:
        problem, status = error, error.status
    except (ValueError, NotImplementedError, OSError) as error:
        problem, status = error, 2 if isinstance(error, (ValueError, NotImplementedError, *PATH_ERRORS)) else 1
    print(f"{prog}: error: {printable(_in_words(problem))}", file=sys.stderr)
    raise SystemExit(status)


def brief(error: BaseException) -> str:
    """Return an error's text in one line of limited length; messages of libraries can be paragraphs."""
    return printable(" ".join(str(error).split()) or type(error).__name__, 300)


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fspath(error.filename)!r}: {error.strerror}."
    return str(error) or type(error).__name__
