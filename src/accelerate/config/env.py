"""The option table read from the environment: the worker's side of the settings that the launcher resolved.

A plugin's field is its argument, else the environment's value, else the plugin's own default, which can differ from the
table's. Variables are spelled in `accelerate.config.options`; this module names none.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from accelerate.config.enums import DistributedType
from accelerate.config.options import BY_NAME, add_third_parties
from accelerate.config.options.schema import to_bool
from accelerate.config.strategies import record_of

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


def value_of(name: str) -> Any:
    """Return the environment's value of an option, else the table's default; errors name the option."""
    if name not in BY_NAME:  # of another package, which the launcher has read and this process has not
        add_third_parties()
    option = BY_NAME[name]
    value = option.read(os.environ)
    return option.default if value is None else value


def setting(argument: Any, name: str, default: Any = None, field: str | None = None) -> Any:
    """Return an argument, else the environment's value of an option, else a default.

    Numbers and truth values are read from text; a ValueError calls the argument `field`. Words are not compared with the
    option's choices: a program may use more of them than the launcher offers.
    """
    if name not in BY_NAME:  # of an extension that is not installed
        return default if argument is None else argument
    option, source = BY_NAME[name], field or name
    if argument is None:
        source = option.env or name
        text = environment().get(source, "").strip()
        argument = option.read(environment()) if option.env_names else text or None
    if argument is None:
        return default
    if option.is_truth:
        return to_bool(argument, source)
    if option.type not in ("int", "float") or (option.type == "float" and type(argument) is int):
        return argument
    value = option.parse(argument, source)
    return default if value is None else value


def fill(plugin: Any, rows: Mapping[str, tuple[str, Any]]) -> None:
    """Give a plugin's fields that are None what `setting` finds; `rows` is field to (option, default)."""
    for field, (name, default) in rows.items():
        if getattr(plugin, field) is None:
            setattr(plugin, field, setting(None, name, default))


# Variables that had an effect in an earlier version, and what replaces them.
REMOVED = {
    "ACCELERATE_CHECKPOINT_READERS": "Every rank reads the checkpoint",
    "ACCELERATE_REPLAY_EVERY": "Use ACCELERATE_CHECK_EVERY, which compares replicas",
    "ACCELERATE_NUMA_AFFINITY": "Use --enable_cpu_affinity, or `torchrun --numa-binding`",
}


def refuse_removed_variables() -> None:
    """Raise ValueError if a removed variable is set: it would have no effect."""
    for name, replacement in REMOVED.items():
        if (value := os.environ.get(name, "0")) not in ("", "0"):
            raise ValueError(
                f"{name}={value!r} has no effect, because this setting was removed. {replacement}. Unset the variable."
            )


def refuse_missing_strategies() -> None:
    """Raise ValueError if the variable of a launcher's switch asks for a strategy whose extension is not installed."""
    for kind in DistributedType:
        variable = f"ACCELERATE_USE_{kind.value}"
        if (value := os.environ.get(variable, "")) and to_bool(value, variable):
            record_of(kind)
