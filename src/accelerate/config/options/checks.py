"""What answers must be beyond their type: each check returns what is wrong with a value, None if nothing is."""

import os
import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], str | None]


def at_least(least: int) -> Check:
    """Return a check that refuses numbers below `least`."""
    return lambda value: None if value >= least else f"it must be at least {least}"


def above_zero(value: float) -> str | None:
    """Refuse numbers that are not above zero."""
    return None if value > 0 else "it must be above 0"


def fraction(value: float) -> str | None:
    """Refuse what is no part of one."""
    return None if 0 <= value < 1 else "it must be at least 0 and below 1"


def port(value: int) -> str | None:
    """Refuse what several machines cannot agree on as a port."""
    return None if 1 <= value <= 65535 else "ports of several machines are numbers from 1 to 65535"


def matching(pattern: str, wanted: str) -> Check:
    """Return a check that refuses texts that do not match a pattern as a whole.

    Args:
        pattern: the regular expression.
        wanted: what to write, for the message.
    """
    return lambda value: None if re.fullmatch(pattern, value) else wanted


def existing_file(value: str) -> str | None:
    """Refuse a path at which there is no file."""
    return None if os.path.isfile(os.path.expanduser(value)) else f"there is no such file (seen from {os.getcwd()})"


def json_file(value: str) -> str | None:
    """Refuse a path at which there is no JSON file."""
    import json  # not for --help

    missing = existing_file(value)
    if missing:
        return missing
    try:
        with open(os.path.expanduser(value), encoding="utf-8") as stream:
            json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        return f"it is no JSON file: {error}"
    return None
