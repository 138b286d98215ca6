"""The option table read from the environment: how a worker learns what the launcher resolved, and the launcher's own layer.

Variables are spelled in `accelerate.config.options`; nothing here names one.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from accelerate.config.options import BY_NAME, FEATURES, OPTIONS, Option, of_feature
from accelerate.config.values import to_bool

_VARIABLES = {variable: option for option in OPTIONS for variable in (option.env, *option.env_names) if variable}


def given(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return what the environment says about an option, or None where it says nothing.

    An empty variable says nothing, as in a shell.

    Args:
        name: the option.
        environ: the variables; those of the process by default.

    Raises:
        KeyError: there is no such option.
        ValueError: the variable does not hold a value of the option; the message names the variable and the choices.

    Example:
        >>> given("mixed_precision", {"ACCELERATE_MIXED_PRECISION": "BF16"})
        'bf16'
    """
    return _read(BY_NAME[name], os.environ if environ is None else environ)


def value_of(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return an option's value for this worker: the environment's, else the default of the table.

    Args and Raises: as `given`.

    Example:
        >>> value_of("dynamo_mode", {})
        'default'
    """
    value = given(name, environ)
    return BY_NAME[name].default if value is None else value


def settings_of(feature: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of all options that only one feature reads, by name.

    Args:
        feature: a key of `accelerate.config.options.FEATURES`, such as "fsdp".
        environ: the variables; those of the process by default.

    Raises:
        KeyError: there is no such feature.
        ValueError: as in `given`.
    """
    return {option.name: value_of(option.name, environ) for option in of_feature(feature)}


def is_requested(feature: str, environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the environment asks for a feature.

    Args and Raises: as `settings_of`.

    Example:
        >>> is_requested("fsdp", {"ACCELERATE_USE_FSDP": "true"})
        True
    """
    row = FEATURES[feature]
    return row.is_on(value_of(row.switch, environ))


def read_all(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return every option that the environment sets: name to (value, variable).

    Args:
        environ: the variables.

    Raises:
        ValueError: as in `given`.
    """
    found = {}
    for variable in [name for name in _VARIABLES if name in environ]:
        option = _VARIABLES[variable]
        value = _read(option, environ)
        if value is not None:
            found[option.name] = (value, option.env or option.env_names[0])
    return found


def _read(option: Option, environ: Mapping[str, str]) -> Any:
    if option.env_names:
        parts = [environ.get(name, "") for name in option.env_names]
        return option.parse([part or "false" for part in parts], option.env_names[0]) if any(parts) else None
    raw = environ.get(option.env, "") if option.env else ""
    return option.parse(raw, option.env) if raw.strip() else None


# What plugins read: an argument, else the environment, else their own default, which can differ from the table's.

_instead: ContextVar[Mapping[str, str] | None] = ContextVar("environment_of_plugins", default=None)


def environment() -> Mapping[str, str]:
    """Return the variables that plugins read: those of the process, but none inside `without_variables`."""
    chosen = _instead.get()
    return os.environ if chosen is None else chosen


@contextmanager
def without_variables() -> Iterator[None]:
    """Let plugins that are built inside see no variables."""
    # Emptying os.environ instead would race with the C code of other threads, which may call getenv at any time.
    token = _instead.set({})
    try:
        yield
    finally:
        _instead.reset(token)


def setting(argument: Any, name: str, default: Any = None, field: str | None = None) -> Any:
    """Return an argument, else what the environment says about an option, else a default.

    Numbers and truth values are read from text. Words are not compared with the option's choices: a program may use more of them
    than the launcher offers.

    Args:
        argument: what the caller of a plugin gave; None means that nothing was given.
        name: the option.
        default: the value where nothing is said.
        field: what errors call the argument; the name of the option by default.

    Raises:
        ValueError: the argument or the variable is no number or truth value.

    Example:
        >>> setting("2", "zero_stage"), setting(None, "zero_stage", 1)
        (2, 1)
    """
    option = BY_NAME[name]
    source = field or name
    if argument is None:
        source = option.env or name
        text = environment().get(source, "").strip()
        argument = _read(option, environment()) if option.env_names else text or None
    if argument is None:
        return default
    if option.is_truth:
        return to_bool(argument, source)
    if option.type not in ("int", "float"):
        return argument
    value = option.parse(argument, source)
    return default if value is None else value


def fill(plugin: Any, rows: Mapping[str, tuple[str, Any]]) -> None:
    """Give a plugin's fields that are None what the environment says, else a default; arguments stay as they are.

    Args:
        plugin: the object.
        rows: field to (option, default).

    Raises:
        ValueError: as in `setting`.
    """
    for field, (name, default) in rows.items():
        if getattr(plugin, field) is None:
            setattr(plugin, field, setting(None, name, default))
