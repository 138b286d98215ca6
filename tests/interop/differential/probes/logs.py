"""Loggers that know the processes of the run."""

import logging
import os
from collections.abc import Iterator
from typing import Any

from accelerate import PartialState
from accelerate.logging import MultiProcessAdapter, get_logger
from interop.differential.core import attempt, probe

BOTH = (1, 2)
LEVELS = ("debug", "warning", "critical", "exception")


class Kept(logging.Handler):
    """A handler that keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(1)
        self.said: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the level, the text, the place and what `extra` brought."""
        extra = {k: v for k, v in vars(record).items() if k in ("one", "two")}
        self.said.append(
            (record.levelname, record.getMessage(), os.path.basename(record.pathname), record.funcName, extra)
        )


def kept(name: str = "probed") -> tuple[logging.Logger, Kept]:
    """Return a logger of the standard library that keeps everything, and its handler."""
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler := Kept()]
    logger.setLevel(1)
    logger.propagate = False
    return logger, handler


CALLS: dict[str, Any] = {
    "plain": ((), {}), "everyone": ((), {"main_process_only": False}), "main": ((), {"main_process_only": True}),
    "in order": ((), {"main_process_only": False, "in_order": True}), "in order on main": ((), {"in_order": True}),
    "not in order": ((), {"main_process_only": False, "in_order": False}), "extra": ((), {"extra": {"one": 1}}),
    "stack level": ((), {"stacklevel": 1}), "exc_info": ((), {"exc_info": False}),
    "None": ((), {"main_process_only": None}), "unknown": ((), {"nonsense": 1}),
}  # fmt: skip


@probe(
    "logging:MultiProcessAdapter", processes=BOTH, method=[*LEVELS, "log", "warning_once"],
    call={k: (lambda v=v: v) for k, v in CALLS.items()}, extra=[None, {"two": 2}],
)  # fmt: skip
def logged(method: str, call: Any, extra: Any) -> Iterator[tuple[str, Any]]:
    PartialState(cpu=True)
    logger, handler = kept()
    adapter = MultiProcessAdapter(logger, extra)
    level = (logging.WARNING,) if method == "log" else ()
    hashable = method != "warning_once" or "extra" not in call[1]
    for number in range(2):
        yield (
            f"returned {number}",
            attempt(lambda: getattr(adapter, method)(*level, "text", *call[0], **call[1])) if hashable else None,
        )
    yield "said", handler.said


def logger_of(call: Any) -> Iterator[tuple[str, Any]]:
    """Make a logger and look at its level and the root's."""
    root = logging.getLogger()
    level = root.level
    try:
        made = call()
        yield "kind", (type(made).__name__, made.name, made.extra)
        yield "levels", (made.logger.level, root.level, made.getEffectiveLevel())
    finally:
        root.setLevel(level)
        logging.getLogger("probed.levels").setLevel(0)


@probe("logging:get_logger", log_level=[None, 10, 0, 55, -5, True, 1.5, b"INFO"])
def logger_level_kinds(log_level: Any) -> Iterator[tuple[str, Any]]:
    yield from logger_of(lambda: get_logger("probed.levels", log_level=log_level))
