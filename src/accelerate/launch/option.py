"""Rows of the option table as arguments of a parser, and the answer to an option that is in no row."""

import argparse
import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from accelerate.config.options import OPTIONS, Option
from accelerate.config.options.schema import both_spellings
from accelerate.launch.config_file import nearest

# Stands for an argument that was not given. A list, because argparse appends repeated arguments to a copy of it.
_NOT_GIVEN: list[Any] = []


class _SpelledTwice(argparse._ActionsContainer):
    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument under both spellings of its long flags; see `argparse.ArgumentParser.add_argument`."""
        return super().add_argument(*both_spellings(args), **kwargs)


class ArgumentGroup(_SpelledTwice, argparse._ArgumentGroup):
    """A heading of a `Parser`."""


class Parser(_SpelledTwice, argparse.ArgumentParser):
    """Accepts `--like_this` and `--like-this`, and lists in `nondefault` which arguments stood on the command line.

    So resolution can tell a choice from a default of the same value.
    """

    group_class = ArgumentGroup

    def add_argument_group(self, *args: Any, **kwargs: Any) -> ArgumentGroup:
        """Add a heading whose arguments are spelled both ways too."""
        group = self.group_class(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse everything; see `argparse.ArgumentParser.parse_args`."""
        words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            parser = self._innermost(words)
            parser.error(parser.unknown(unknown))
        return parsed

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse what is known, and note in `nondefault` which arguments were given."""
        if namespace is not None:
            return super().parse_known_args(args, namespace)
        # argparse assigns a default only to a missing attribute: what still holds the mark afterwards was not given.
        actions = {action.dest: action for action in self._actions}
        marked = [name for name, action in actions.items() if action.default is not argparse.SUPPRESS]
        parsed, rest = super().parse_known_args(args, argparse.Namespace(**dict.fromkeys(marked, _NOT_GIVEN)))
        given = {name for name in actions if getattr(parsed, name, _NOT_GIVEN) is not _NOT_GIVEN}
        for name in set(marked) - given:
            action, default = actions[name], actions[name].default
            is_row = isinstance(action.type, functools.partial)  # the defaults of the table are values, not text
            if isinstance(default, str) and not is_row:
                default = self._get_value(action, default)
            setattr(parsed, name, default)
        # The parser of a sub-command has noted its own.
        parsed.nondefault = given | set(getattr(parsed, "nondefault", ()))
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

    def _innermost(self, words: Sequence[str]) -> "Parser":
        """Return the parser of the subcommand that was chosen, or this one."""
        for position, word in enumerate(words):
            for action in self._actions:
                inner = action.choices.get(word) if isinstance(action, argparse._SubParsersAction) else None
                if isinstance(inner, Parser):
                    return inner._innermost(words[position + 1 :])
        return self

    def _correction(self, flag: str) -> str:
        known = {spelling.replace("-", "_"): spelling for spelling in reversed(self._option_string_actions)}
        near = nearest(flag.lower().replace("-", "_"), known)
        hint = f"did you mean {known[near]}?" if near else f"`{self.prog} --help` lists the options."
        return f"{flag} is unknown; {hint}"


def add_options(parser: Parser, options: Iterable[Option] = OPTIONS) -> None:
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
        heading.add_argument(*option.spellings, help=option.help.replace("%", "%%"), **common, **kind)
        if option.negation:
            opposite = f"The opposite of {option.spellings[0]}."
            heading.add_argument(*both_spellings([option.negation]), action="store_false", help=opposite, **common)


def _read(option: Option, text: str) -> Any:
    """Read the value of a flag; argparse calls it."""
    if text.lower() in option.unset:  # it could not undo what a lower layer sets
        raise argparse.ArgumentTypeError(f"{option.name} is {text!r}; leave the option out for that.")
    try:
        return option.parse(text)
    except ValueError as error:
        if option.choices is not None:
            return text  # argparse lists the choices
        raise argparse.ArgumentTypeError(str(error)) from None
