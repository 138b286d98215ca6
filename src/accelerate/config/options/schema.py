"""The shape of a row in the option table, and how its values turn from text to Python and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.config.values import to_bool, to_int

# How `encode` spells a value in the environment of a worker.
PLAIN = "plain"  # str(value), so a bool is "True" or "False"
LOWER = "lower"  # as PLAIN, but a bool is "true" or "false"
UPPER = "upper"  # in upper case
BIT = "bit"  # "1" or "0"
ON = "on"  # "true" when set, else no variable at all
ONE = "one"  # "1" when set, else no variable at all


@dataclass(frozen=True)
class Option:
    """One setting of a run: everything that any part of the package knows about it.

    Attributes:
        name: the attribute of the parsed arguments, and the default of the flag and of the key in a configuration file.
        group: the heading it is listed under in `accelerate launch --help`.
        help: one sentence for `--help`.
        type: `str`, `int`, `float`, `bool`, `strs` (repeatable, a list) or `bools` (comma-separated truth values).
        default: the value when nobody sets it. None means that the launcher or the worker decides.
        choices: the accepted words, or None for anything.
        corrections: accepted words that stand for others.
        unset: words, in a file or a variable, that say that nobody sets it.
        flags: spellings on the command line, long ones with underscores (hyphens work too); None means `--name`, an
            empty tuple means that only a configuration file can set it.
        switch: True for a flag that takes no value and means true.
        negation: a flag that sets it to false.
        env: the variable in which the launcher hands the value to the worker, and which sets it from outside.
        env_names: the variables of a `bools` option, one for each value, instead of `env`.
        style: how `encode` spells the value.
        above_one: another option that must be more than one for this one to be exported.
        section: the mapping in the configuration file that holds the key; None is the top level.
        key: the key in the configuration file; an empty string means that a file cannot set it.
        feature: the feature (see `accelerate.config.options.features`) without which it has no effect.
        question: what `accelerate config` asks; None if it does not ask.
    """

    name: str
    group: str
    help: str
    type: str = "str"
    default: Any = None
    choices: tuple[str, ...] | None = None
    corrections: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    flags: tuple[str, ...] | None = None
    switch: bool = False
    negation: str | None = None
    env: str | None = None
    env_names: tuple[str, ...] = ()
    style: str = PLAIN
    above_one: str | None = None
    section: str | None = None
    key: str | None = None
    feature: str | None = None
    question: str | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flags as argparse takes them: each with underscores first, then with hyphens if that differs."""
        flags = (f"--{self.name}",) if self.flags is None else self.flags
        return tuple(both for flag in flags for both in dict.fromkeys((flag, hyphenated(flag))))

    @property
    def file_key(self) -> str | None:
        """The key in a configuration file, or None if a file cannot set the option."""
        return (self.name if self.key is None else self.key) or None

    def parse(self, raw: Any, source: str | None = None) -> Any:
        """Turn what a flag, a variable or a configuration file holds into the option's value.

        Args:
            raw: text, or what YAML made of it.
            source: where it stands, for the error; the name of the option by default.

        Returns:
            The value, or None for None and for a word of `unset`.

        Raises:
            ValueError: it is not of the option's type, or none of its choices. The message lists the choices.
        """
        if raw is None or (self.unset and str(raw).lower() in self.unset):
            return None
        source = source or self.name
        value = _PARSERS[self.type](raw, source)
        if self.choices is None:
            return value
        # YAML 1.1 reads an unquoted `no` as False.
        word = "no" if raw is False and "no" in self.choices else str(value)
        for choice in self.choices:
            if choice.lower() == word.lower():
                return self.corrections.get(choice, choice)
        raise ValueError(f"{source} is {raw!r}; choose one of {', '.join(self.choices)}.")

    def encode(self, value: Any) -> dict[str, str]:
        """Turn the option's value into the environment variables of a worker.

        Returns:
            Variable names and their text; empty if the option has no variable or nothing is to be said.
        """
        if value is None:
            return {}
        if self.env_names:
            return {name: str(int(part)) for name, part in zip(self.env_names, value, strict=True)}
        if self.env is None or (self.style in (ON, ONE) and not value):
            return {}
        text = str(value)
        if self.style == UPPER:
            text = text.upper()
        elif self.style == BIT:
            text = str(int(value))
        elif self.style == ON:
            text = "true"
        elif self.style == ONE:
            text = "1"
        elif self.style == LOWER and isinstance(value, bool):
            text = text.lower()
        return {self.env: text}


def hyphenated(flag: str) -> str:
    """Return the other spelling of a long flag: `--num_processes` is `--num-processes`."""
    return "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag


def _text(raw: Any, source: str) -> str:
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def _real(raw: Any, source: str) -> float:
    try:
        return float(raw)
    except (TypeError, ValueError):
        raise ValueError(f"{source} is {raw!r}; it must be a number.") from None


def _texts(raw: Any, source: str) -> list[str]:
    return [str(item) for item in raw] if isinstance(raw, (list, tuple)) else [str(raw)]


def _bools(raw: Any, source: str) -> tuple[bool, ...]:
    parts = raw if isinstance(raw, (list, tuple)) else str(raw).strip("()[] ").split(",")
    values = tuple(to_bool(part, source) for part in parts)
    if len(values) != 3:
        raise ValueError(f"{source} is {raw!r}; it takes three truth values, such as false,false,true.")
    return values


_PARSERS = {"str": _text, "int": to_int, "float": _real, "bool": to_bool, "strs": _texts, "bools": _bools}
