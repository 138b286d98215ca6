"""The option table read from the environment: how a worker learns what the launcher resolved, and the launcher's own layer.

Variables are spelled in `accelerate.config.options`; nothing here names one.
"""

import os
from collections.abc import Mapping
from typing import Any

from accelerate.config.options import BY_NAME, FEATURES, OPTIONS, Option, of_feature

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
