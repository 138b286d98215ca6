"""Rows of the option table as arguments of a parser."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from accelerate.config.options import OPTIONS, Option
from accelerate.config.options.schema import hyphenated

# argparse already has this heading.
_PLAIN_HEADING = "options"


class Parser(argparse.ArgumentParser):
    """A parser that accepts `--like_this` and `--like-this`, and remembers what was given.

    Parsed arguments carry `nondefault`, the names of all arguments that stood on the command line, so that resolution
    can tell a choice from a default of the same value.
    """

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument under both spellings of its long flags; see `argparse.ArgumentParser.add_argument`."""
        return super().add_argument(*both_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> "ArgumentGroup":
        """Add a heading whose arguments are spelled both ways too."""
        group = ArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse what is known, and note in `nondefault` which arguments were given."""
        if namespace is not None:
            return super().parse_known_args(args, namespace)
        # argparse assigns a default only to a missing attribute: what still holds the mark afterwards was not given.
        marked = argparse.Namespace(
            **{action.dest: _NOT_GIVEN for action in self._actions if action.default is not argparse.SUPPRESS}
        )
        parsed, rest = super().parse_known_args(args, marked)
        missing = {name for name, value in vars(parsed).items() if value is _NOT_GIVEN}
        given = {action.dest for action in self._actions if hasattr(parsed, action.dest)} - missing
        for action in self._actions:
            if action.dest in missing:
                default = action.default
                setattr(parsed, action.dest, self._get_value(action, default) if isinstance(default, str) else default)
        for name in given:
            if isinstance(getattr(parsed, name), _NotGiven):
                setattr(parsed, name, list(getattr(parsed, name)))
        parsed.nondefault = given
        return parsed, rest


class ArgumentGroup(argparse._ArgumentGroup):
    """A heading of a `Parser`."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument under both spellings of its long flags."""
        return super().add_argument(*both_spellings(args), **kwargs)


class _NotGiven(list):
    """Stands for an argument that was not given. A list, because repeatable arguments are appended to a copy of it."""


_NOT_GIVEN = _NotGiven()


def both_spellings(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the flags with the hyphenated spelling of each long one beside it."""
    return tuple(dict.fromkeys(spelling for flag in flags for spelling in (flag, hyphenated(flag))))


def add_options(parser: Parser, options: Iterable[Option] = OPTIONS) -> None:
    """Add rows of the option table to a parser, each under its heading.

    Options without flags are left out: only a configuration file can set them.

    Args:
        parser: the parser; it is changed in place.
        options: the rows, in the order of `--help`.
    """
    headings: dict[str, Any] = {_PLAIN_HEADING: parser}
    for option in options:
        if not option.spellings:
            continue
        if option.group not in headings:
            headings[option.group] = parser.add_argument_group(option.group)
        heading = headings[option.group]
        heading.add_argument(*option.spellings, **_keywords(option))
        if option.negation:
            heading.add_argument(
                option.negation,
                dest=option.name,
                action="store_false",
                default=option.default,
                help=f"The opposite of {option.spellings[0]}.",
            )


def _keywords(option: Option) -> dict[str, Any]:
    common = {"dest": option.name, "default": option.default, "help": option.help.replace("%", "%%")}
    if option.switch:
        return {**common, "action": "store_true"}
    if option.type == "strs":
        return {**common, "action": "append", "type": str}
    return {**common, "type": _reader(option), "choices": option.choices}


def _reader(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            if option.choices is not None:
                return text  # argparse lists the choices
            raise argparse.ArgumentTypeError(str(error)) from None

    read.__name__ = option.type
    return read
