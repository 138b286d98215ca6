"""Values as the libraries take them: numbers, with a word about what is left out."""

import logging
from typing import Any

logger = logging.getLogger(__name__)

_mentioned: set[tuple[str, str]] = set()


def as_number(value: Any) -> int | float | None:
    """Return a value as a Python number, or None when it is none.

    Args:
        value: A number, or a tensor or array of one element.

    Example:
        >>> import torch
        >>> as_number(torch.tensor(2.0)), as_number("2.0")
        (2.0, None)
    """
    if isinstance(value, (int, float)):
        return value
    if hasattr(value, "item") and hasattr(value, "shape"):
        try:
            number = value.item()
        except (RuntimeError, ValueError, TypeError):  # more than one element
            return None
        return number if isinstance(number, (int, float)) else None
    return None


def numbers_of(values: dict[str, Any], library: str) -> dict[str, int | float]:
    """Return the values that are numbers; each of the others is mentioned once in the log.

    Args:
        values: Names and values.
        library: Who takes only numbers, for the message.
    """
    numbers = {}
    for name, value in values.items():
        number = as_number(value)
        if number is None:
            mention(library, name, value)
        else:
            numbers[name] = number
    return numbers


def mention(library: str, name: str, value: Any) -> None:
    """Say, once for each library and name, that a value is left out because it is not a number."""
    if (library, name) not in _mentioned:
        _mentioned.add((library, name))
        logger.warning("%s takes numbers; %r is a %s and is not logged there.", library, name, type(value).__name__)
