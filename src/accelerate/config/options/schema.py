"""The format of a row in the option table, the conversion of its values between text and Python, and their checks."""

import enum
import itertools
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from accelerate.base.environment import str_to_bool


class _Several:
    """Contains every number above one."""

    def __contains__(self, value: Any) -> bool:
        return value is not None and value > 1


# Returns the fault of a value, None if there is none.
Check = Callable[[Any], str | None]
# The answers that a question of the interview needs: name to the accepted values; None stands for no answer.
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
    """One setting of a run: all facts that any part of the package uses.

    Attributes:
        name: the attribute of the parsed arguments, and the default of the flag and of the key in a configuration file.
        group: the heading it is listed under in `accelerate launch --help`.
        help: one sentence for `--help` and for `accelerate config`, which asks in the order of the table.
        type: `str`, `int`, `float`, `bool`, `strs` (repeatable, a list), `bools` (comma-separated truth values) or `json` (a
            mapping, kept as JSON text). By default `bool` for a switch, else that of `default` or of `offer`, else `str`.
        default: the value if no source sets it. None means that the launcher or the worker decides.
        corrections: accepted words that stand for others.
        unset: words, in a file or a variable, that mean "not set".
        flags: spellings with underscores (hyphens work too); None is `--name`, an empty tuple a setting of files only.
        switch: True for a flag that takes no value and means true.
        negation: a flag that sets it to false.
        env: the variable in which the launcher passes the value to the worker; a user can also set it.
        env_names: the variables of a `bools` option, one for each value, instead of `env`.
        style: the spelling that `encode` uses.
        exported_if_several: another option that must be more than one for this one to be exported.
        section: the mapping in the configuration file that holds the key; None is the top level.
        key: the key in the configuration file; an empty string means that a file cannot set it.
        feature: the feature (see `Feature`) without which it has no effect.
        words: the words that `accelerate config` offers and `config validate` knows, where a command line takes any text.
        allow_other: other words than these may be right as well.
        special_words: answers, and the words that are then offered instead of `words` or `choices`.
        chapter: where `accelerate config` asks for it, if a file can set it and there is such a `Chapter`.
        when: the answers that the question needs.
        offer: the value that Enter takes in the interview; None means `default`.
        optional: Enter leaves the option out of the file.
        check: returns the fault of an answer.
        before: the row in front of which a row of an extension is listed; without it, at the end.
        spellings, file_key, variables: derived: the flags with underscores, then with hyphens; the key or None; all variables.
    """

    name: str
    group: str
    help: str
    type: str = ""
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
    exported_if_several: str | None = None
    section: str | None = None
    key: str | None = None
    feature: str | None = None
    words: tuple[str, ...] = ()
    allow_other: bool = False
    special_words: tuple[Answers, tuple[str, ...]] | None = None
    chapter: str = "other"
    when: Answers = field(default_factory=dict)
    offer: Any = None
    optional: bool = False
    check: Check | None = None
    before: str = ""
    # Derived once a row, since the parser and the reader of files ask each row for them.
    spellings: tuple[str, ...] = field(init=False, repr=False, compare=False)
    file_key: str | None = field(init=False, repr=False, compare=False)
    variables: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the type, the two spellings of each flag, the key in a file, and the variables."""
        usual = self.offer if self.default is None else self.default
        kind = bool if self.switch else str if usual is None else type(usual)
        object.__setattr__(self, "type", self.type or kind.__name__)
        flags = (f"--{self.name}",) if self.flags is None else self.flags
        object.__setattr__(self, "spellings", both_spellings(flags))
        object.__setattr__(self, "file_key", (self.name if self.key is None else self.key) or None)
        object.__setattr__(self, "variables", (self.env,) if self.env else self.env_names)

    @property
    def is_truth(self) -> bool:
        """Whether the option is true or false, even if it is kept as a text."""
        return self.type == "bool" or self.words == TRUE_OR_FALSE

    def offered(self, answers: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the words that the interview offers for these answers; none if any text is accepted."""
        if self.special_words is not None and conditions_met(answers, self.special_words[0]):
            return self.special_words[1]
        return tuple(word for word in self.words or self.choices or () if word not in self.corrections)

    def parse(self, raw: Any, source: str | None = None) -> Any:
        """Turn the text of a flag, a variable or a configuration file into the value; None for None and for a word of `unset`.

        Raises:
            ValueError: it is not of the option's type, or none of its choices; the message names `source` and lists the choices.
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

    def fault(self, value: Any) -> str | None:
        """Return the fault of a whole number beyond its type; a port is checked if several machines use it."""
        checked = self.type == "int" and value is not None and self.check not in (None, port)
        return self.check(value) if checked else None

    def read(self, environ: Mapping[str, str]) -> Any:
        """Return the value of the environment, None if it is not set; raise as `parse`, naming the variable."""
        texts = [environ.get(name, "") for name in self.variables]
        if not "".join(texts).strip():
            return None
        return self.parse([text or "false" for text in texts] if self.env_names else texts[0], self.variables[0])

    def encode(self, value: Any) -> dict[str, str]:
        """Turn the option's value into the environment variables of a worker: none if there is nothing to say."""
        if value is None:
            return {}
        if self.env_names:
            return {name: str(int(part)) for name, part in zip(self.env_names, value, strict=True)}
        if self.env is None or (self.style in (ON, ONE) and not value):
            return {}
        return {self.env: _WRITERS[self.style](value)}


@dataclass(frozen=True)
class Feature:
    """A way of training that needs a separate runner or engine.

    Attributes:
        title: its name in messages.
        switch: the option that turns it on.
        wanted: the value of the switch that does so; None: any that is set and not false; an integer: any above it.
        section: the mapping of a configuration file that nothing else reads.
        kinds: the words of `distributed_type` in a configuration file that ask for it.
        devices: the devices that it needs, such as "TPUs", so that it excludes `--cpu`.
        runners: the candidate runners; the first whose `starts` returns True starts the run.
        interview: "module:function" that asks for the settings of a file for it, if `switch` is `compute_environment`.
        keys: further keys at the top level of such a file.
        words: accepted values of `distributed_type` in such a file.
    """

    title: str
    switch: str
    wanted: Any = None
    section: str = ""
    kinds: tuple[str, ...] = ()
    devices: str = ""
    runners: tuple[str, ...] = ()
    interview: str = ""
    keys: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def is_on(self, value: Any) -> bool:
        """Tell whether this value of the switch asks for the feature."""
        if isinstance(self.wanted, int):
            return value is not None and value > self.wanted
        return bool(value) if self.wanted is None else value == self.wanted

    @property
    def request(self) -> str:
        """How to ask for the feature on the command line."""
        if self.wanted is None:
            return f"--{self.switch}"
        return f"--{self.switch} {'N' if isinstance(self.wanted, int) else self.wanted}"


@dataclass(frozen=True)
class Chapter:
    """Some questions of the interview.

    Attributes:
        question: asked first, if any; no passes the chapter over. The answer is stored under the chapter's name.
        when: the answers without which the chapter is passed over.
        was: the default of `question` is yes if an earlier file sets this option.
        before: the chapter of the core that a chapter of an extension comes before; without it, the last one.
    """

    name: str
    question: str | None = None
    when: Answers = field(default_factory=dict)
    was: str | None = None
    before: str = ""


def rows(group: str, prefix: str = "", **shared: Any) -> Callable[..., Option]:
    """Return a function that makes the options of a heading from a name, a help text and further fields.

    `shared` are the fields that they have in common. In `env` and `key`, `*` stands for the name without the prefix. `choices`
    and `words` may be one text. The chapter is that of the feature by default.
    """

    def row(name: str, help: str, **fields_of_option: Any) -> Option:
        fields = {"chapter": shared.get("feature", "other"), **shared, **fields_of_option}
        for field_name, word in (("env", name.upper()), ("key", name)):
            if fields.get(field_name):
                fields[field_name] = fields[field_name].replace("*", word)
        for field_name in {"choices", "words"} & fields.keys():
            several = fields[field_name]
            fields[field_name] = tuple(several.split() if isinstance(several, str) else several)
        return Option(prefix + name, group, help, **fields)

    return row


# Checks of a value beyond its type


def at_least(least: int) -> Check:
    """Return a check that refuses numbers below `least`."""
    return lambda value: None if value >= least else f"it must be at least {least}"


def fraction(value: float) -> str | None:
    """Refuse a value that is not a fraction."""
    return None if 0 <= value < 1 else "it must be at least 0 and below 1"


def port(value: int) -> str | None:
    """Refuse what several machines cannot agree on as a port."""
    return None if 1 <= value <= 65535 else "ports of several machines are numbers from 1 to 65535"


def matching(pattern: str, message: str) -> Check:
    """Return a check that refuses texts that do not fully match a pattern, with that message."""
    return lambda value: None if re.fullmatch(pattern, value) else message


def existing_file(value: str) -> str | None:
    """Refuse a path at which there is no file."""
    return None if os.path.isfile(os.path.expanduser(value)) else f"there is no such file (seen from {os.getcwd()})"


def json_file(value: str) -> str | None:
    """Refuse a path at which there is no JSON file."""
    missing = existing_file(value)
    if missing:
        return missing
    try:
        with open(os.path.expanduser(value), encoding="utf-8") as stream:
            json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        return f"it is no JSON file: {error}"
    return None


# Conversion of users' spellings (strings, environment variables, YAML scalars) into values

E = TypeVar("E", bound=enum.Enum)


def to_bool(value: Any, name: str) -> bool:
    """Read a truth value: a bool, 0 or 1, or a word of `str_to_bool`; a ValueError calls the value `name`."""
    try:
        return bool(str_to_bool(str(value).strip()))
    except ValueError:
        raise ValueError(f"{name} is {value!r}; write true or false.") from None


def to_int(value: Any, name: str) -> int:
    """Read a whole number that may be written as text; a ValueError calls the value `name`."""
    try:
        number = int(value)
        if isinstance(value, str) or number == value:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is {value!r}; it must be an integer.")


def to_enum(kind: type[E], value: Any, name: str, aliases: Mapping[str, E | None] | None = None) -> E | None:
    """Read a member from itself, its name or value, or an upper-case alias; a ValueError lists the names."""
    if isinstance(value, kind):
        return value
    word = str(value).strip().upper()
    named = {member.name.upper(): member for member in kind} | dict(aliases or {})
    members = {str(member.value).upper(): member for member in kind} | named
    if word not in members:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(sorted(named))}.")
    return members[word]


def one_of(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return a value that is among the choices; a ValueError lists them."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, choices))}.")
    return value


def to_names(value: Any) -> list[str]:
    """Split comma-joined names; a sequence of names becomes a list."""
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() for part in parts if part.strip()]


# Flags, answers and values


def both_spellings(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the flags with the hyphenated spelling of each long one behind it: `--a_b` is `--a-b` as well."""
    spelled = [(flag, flag.replace("_", "-") if flag.startswith("--") else flag) for flag in flags]
    return tuple(dict.fromkeys(itertools.chain(*spelled)))


def conditions_met(answers: Mapping[str, Any], conditions: Answers) -> bool:
    """Return whether each answer that is wanted has been given."""
    return all(answers.get(name) in accepted for name, accepted in conditions.items())


def _text(raw: Any, source: str = "") -> str:
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def _real(raw: Any, source: str) -> float:
    try:
        return float(raw)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{source} is {raw!r}; it must be a number.") from None


def _texts(raw: Any, source: str) -> list[str]:
    return [str(item) for item in raw] if isinstance(raw, (list, tuple)) else [str(raw)]


def _bools(raw: Any, source: str) -> tuple[bool, ...]:
    parts = raw if isinstance(raw, (list, tuple)) else str(raw).strip("()[] ").split(",")
    values = tuple(to_bool(part, source) for part in parts)
    if len(values) != 3:
        raise ValueError(f"{source} is {raw!r}; it takes three truth values, such as false,false,true.")
    return values


def to_mapping(raw: Any, source: str) -> dict[str, Any]:
    """Read a mapping that may be written as JSON; a ValueError calls it `source`."""
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    raise ValueError(f'{source} is {raw!r}; it must be a mapping, such as {{"*norm*": "fp32"}}.')


_WRITERS: dict[str, Callable[[Any], str]] = {
    PLAIN: str,
    LOWER: _text,
    UPPER: lambda value: str(value).upper(),
    BIT: lambda value: str(int(value)),
    ON: lambda value: "true",
    ONE: lambda value: "1",
}
_PARSERS = {"str": _text, "int": to_int, "float": _real, "bool": to_bool, "strs": _texts, "bools": _bools}
_PARSERS["json"] = lambda raw, source: json.dumps(to_mapping(raw, source))
