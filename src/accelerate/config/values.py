"""Turn what users write (strings, environment variables, YAML scalars) into the values that plugins work with."""

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

E = TypeVar("E", bound=enum.Enum)

_TRUE = frozenset(("1", "true", "t", "yes", "y", "on"))
_FALSE = frozenset(("0", "false", "f", "no", "n", "off"))


def to_bool(value: Any, name: str) -> bool:
    """Read a truth value that may be written as a word.

    Args:
        value: a bool, 0 or 1, or one of true/false, yes/no, y/n, t/f, on/off, 1/0 in any case.
        name: the argument or variable it came from, for the error.

    Raises:
        ValueError: `value` is none of these.
    """
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{name} is {value!r}; write true or false.")


def to_int(value: Any, name: str) -> int:
    """Read a whole number that may be written as text.

    Raises:
        ValueError: `value` is no whole number.
    """
    try:
        number = int(value)
        if isinstance(value, str) or number == value:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is {value!r}; it must be an integer.")


def to_enum(kind: type[E], value: Any, name: str, aliases: Mapping[str, E] | None = None) -> E:
    """Read a member of an enumeration from the member itself, its name in any case, or its value.

    Args:
        kind: the enumeration.
        value: what the user wrote.
        name: the argument it came from, for the error.
        aliases: other (upper-case) names of members.

    Raises:
        ValueError: nothing matches; the message lists the names.
    """
    if isinstance(value, kind):
        return value
    word = str(value).strip().upper()
    named = {member.name.upper(): member for member in kind} | dict(aliases or {})
    by_value = {str(member.value).upper(): member for member in kind}
    if word in named:
        return named[word]
    if word in by_value:
        return by_value[word]
    raise ValueError(f"{name} is {value!r}; choose one of {', '.join(sorted(named))}.")


def to_names(value: Any) -> list[str]:
    """Split comma-joined names; a sequence of names becomes a list.

    Example:
        >>> to_names("GPT2Block, GPT2MLP")
        ['GPT2Block', 'GPT2MLP']
    """
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() for part in parts if part.strip()]
