"""The shape of a row in the option table, and how its values turn from text to Python and back."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.config.options.checks import Check
from accelerate.config.values import to_bool, to_int


class _Several:
    """Contains every number above one."""

    def __contains__(self, value: Any) -> bool:
        return value is not None and value > 1


# Which answers a question of the interview needs: name to the values of which it is one; None stands for no answer.
Answers = Mapping[str, Container[Any]]
NOT_GIVEN = (None,)
SEVERAL = _Several()
# Words of an option that is true or false, but kept as a text.
TRUE_OR_FALSE = ("true", "false")

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
        words: the words that `accelerate config` offers and `config validate` knows, where a command line takes any text.
        open: other words than these may be right as well.
        special_words: answers, and the words that are offered beside them instead of `words` or `choices`.
        question: what `accelerate config` asks; None if it does not ask.
        chapter: where in the interview it asks; see `accelerate.config.options.chapters`.
        after: the option of the same chapter behind whose question this one comes; None means the order of the table.
        when: the answers without which it does not ask.
        offer: the value that Enter takes in the interview; None means `default`.
        optional: Enter leaves the option out of the file.
        check: says what is wrong with an answer.
        spellings: the flags as argparse takes them: each with underscores first, then with hyphens if that differs.
        file_key: the key in a configuration file, or None if a file cannot set the option.
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
    words: tuple[str, ...] = ()
    open: bool = False
    special_words: tuple[Answers, tuple[str, ...]] | None = None
    question: str | None = None
    chapter: str = "other"
    after: str | None = None
    when: Answers = field(default_factory=dict)
    offer: Any = None
    optional: bool = False
    check: Check | None = None
    # Derived once a row, since the parser and the reader of files ask each row for them.
    spellings: tuple[str, ...] = field(init=False, repr=False, compare=False)
    file_key: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the two spellings of each flag, and the key in a file."""
        flags = (f"--{self.name}",) if self.flags is None else self.flags
        object.__setattr__(self, "spellings", both_spellings(flags))
        object.__setattr__(self, "file_key", (self.name if self.key is None else self.key) or None)

    @property
    def is_truth(self) -> bool:
        """Whether the option is true or false, even if it is kept as a text."""
        return self.type == "bool" or self.words == TRUE_OR_FALSE

    def offered(self, answers: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the words that the interview offers beside these answers; none if any text is an answer.

        Words that stand for others are not offered.
        """
        if self.special_words is not None and agree(answers, self.special_words[0]):
            return self.special_words[1]
        return tuple(word for word in self.words or self.choices or () if word not in self.corrections)

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


def both_spellings(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the flags with the hyphenated spelling of each long one behind it: `--a_b` is `--a-b` as well."""
    spelled: dict[str, None] = {}
    for flag in flags:
        spelled[flag] = None
        if flag.startswith("--"):
            spelled["--" + flag[2:].replace("_", "-")] = None
    return tuple(spelled)


def agree(answers: Mapping[str, Any], wanted: Answers) -> bool:
    """Say whether each answer that is wanted has been given."""
    return all(answers.get(name) in accepted for name, accepted in wanted.items())


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
