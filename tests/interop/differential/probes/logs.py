"""Loggers that know the processes of the run."""

import logging
import os
from collections.abc import Iterator
from typing import Any

from accelerate import PartialState
from accelerate.logging import MultiProcessAdapter, get_logger
from interop.differential.core import Words, probe
from interop.differential.probes.nested import outcome

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
    "plain": ((), {}),
    "everyone": ((), {"main_process_only": False}),
    "main": ((), {"main_process_only": True}),
    "in order": ((), {"main_process_only": False, "in_order": True}),
    "in order on main": ((), {"in_order": True}),
    "not in order": ((), {"main_process_only": False, "in_order": False}),
    "extra": ((), {"extra": {"one": 1}}),
    "stack level": ((), {"stacklevel": 1}),
    "exc_info": ((), {"exc_info": False}),
    "None": ((), {"main_process_only": None}),
    "unknown": ((), {"nonsense": 1}),
}


@probe(
    "logging:MultiProcessAdapter",
    processes=BOTH,
    method=[*LEVELS, "log", "warning_once"],
    call={k: (lambda v=v: v) for k, v in CALLS.items()},
    extra=[None, {"two": 2}],
)
def logged(method: str, call: Any, extra: Any) -> Iterator[tuple[str, Any]]:
    PartialState(cpu=True)
    logger, handler = kept()
    adapter = MultiProcessAdapter(logger, extra)
    level = (logging.WARNING,) if method == "log" else ()
    hashable = method != "warning_once" or "extra" not in call[1]
    for number in range(2):
        yield (
            f"returned {number}",
            outcome(lambda: getattr(adapter, method)(*level, "text", *call[0], **call[1])) if hashable else None,
        )
    yield "said", handler.said


@probe(
    "logging:MultiProcessAdapter",
    processes=BOTH,
    message=["text", "", "%s", "%s and %d", "ü 100%", None, 5, ["a"], {"a": 1}],
    args=[(), ("x",), ("x", 3), ({"k": 1},)],
    keywords=[{}, {"main_process_only": False}],
)
def messages(message: Any, args: Any, keywords: Any) -> Iterator[tuple[str, Any]]:
    PartialState(cpu=True)
    logger, _ = kept()
    records: list[Any] = []
    logger.handlers[0].emit = records.append  # type: ignore[method-assign]
    yield "returned", outcome(lambda: MultiProcessAdapter(logger, {}).info(message, *args, **keywords))
    yield "said", [(r.msg, r.args if not isinstance(r.args, dict) else dict(r.args)) for r in records]
    yield "text", [outcome(r.getMessage) for r in records]


@probe("logging:MultiProcessAdapter", level=[0, 1, 10, 20, 30, 50, 99, -1], threshold=[10, 20, 30, 60])
def levels(level: int, threshold: int) -> Iterator[tuple[str, Any]]:
    PartialState(cpu=True)
    logger, handler = kept()
    logger.setLevel(threshold)
    adapter = MultiProcessAdapter(logger, {})
    yield "returned", outcome(lambda: adapter.log(level, "text"))
    yield "said", handler.said
    yield "enabled", (adapter.isEnabledFor(level), adapter.getEffectiveLevel())


@probe("logging:MultiProcessAdapter", level=[None, "INFO", 1.5])
def level_kinds(level: Any) -> Any:
    PartialState(cpu=True)
    logger, handler = kept()
    MultiProcessAdapter(logger, {}).log(level, "text")
    return handler.said


class Shouting(MultiProcessAdapter):
    """An adapter of the user's that changes messages."""

    def process(self, msg: Any, kwargs: Any) -> Any:
        """Make it loud."""
        msg, kwargs = super().process(msg, kwargs)
        return f"<{str(msg).upper()}>", kwargs


@probe(
    "logging:MultiProcessAdapter",
    processes=BOTH,
    keywords=[{}, {"main_process_only": False}, {"main_process_only": False, "in_order": True}],
)
def overridden(keywords: Any) -> Any:
    PartialState(cpu=True)
    logger, handler = kept()
    Shouting(logger, {}).warning("text", **keywords)
    return handler.said


@probe(
    "logging:MultiProcessAdapter",
    processes=BOTH,
    message=["text", None, 3],
    keywords=[{}, {"extra": {"one": 1}}, {"stacklevel": 3}],
    extra=[None, {}, {"two": 2}],
)
def process(message: Any, keywords: Any, extra: Any) -> Iterator[tuple[str, Any]]:
    PartialState(cpu=True)
    yield "result", outcome(lambda: MultiProcessAdapter(kept()[0], extra).process(message, keywords))
    yield "argument", keywords


def through(adapter: Any, depth: int, **keywords: Any) -> None:
    """Log from a number of calls below."""
    if depth:
        through(adapter, depth - 1, **keywords)
    else:
        adapter.warning("text", **keywords)


@probe(
    "logging:MultiProcessAdapter",
    depth=[0, 2],
    stacklevel=[None, 1, 2, 3, 9],
    wrapping=["none", "adapter", "adapters", "outside"],
)
def places(depth: int, stacklevel: Any, wrapping: str) -> Any:
    """Name the function and file of the record."""
    PartialState(cpu=True)
    logger, handler = kept()
    adapter: Any = {
        "none": lambda: MultiProcessAdapter(logger, {}),
        "adapter": lambda: MultiProcessAdapter(logging.LoggerAdapter(logger, {}), {}),
        "adapters": lambda: MultiProcessAdapter(MultiProcessAdapter(logger, {}), {}),
        "outside": lambda: logging.LoggerAdapter(MultiProcessAdapter(logger, {}), {}),
    }[wrapping]()
    through(adapter, depth, **({} if stacklevel is None else {"stacklevel": stacklevel}))
    return [(level, text, function if file == "logs.py" else file) for level, text, file, function, _ in handler.said]


@probe("logging:MultiProcessAdapter", main_process_only=[True, False, None])
def should_log(main_process_only: Any) -> Any:
    PartialState(cpu=True)
    return MultiProcessAdapter._should_log(main_process_only)


@probe(
    "logging:MultiProcessAdapter",
    "logging:get_logger",
    method=[*LEVELS, "warning_once"],
    keywords=[{}, {"main_process_only": False}, {"in_order": True}],
)
def stateless(method: str, keywords: Any) -> Any:
    """Log before any state was built."""
    logger, handler = kept()
    outcome_ = outcome(lambda: getattr(get_logger("probed"), method)("text", **keywords))
    return outcome_, handler.said


WORDS = Words(
    [
        "DEBUG",
        "debug",
        "Info",
        "INFO",
        "WARNING",
        "warn",
        "WARN",
        "ERROR",
        "critical",
        "FATAL",
        "notset",
        "",
        "loud",
        "10",
        " INFO",
    ]
)


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


@probe("logging:get_logger", log_level=WORDS)
def logger_levels(log_level: Any) -> Iterator[tuple[str, Any]]:
    yield from logger_of(lambda: get_logger("probed.levels", log_level))


@probe("logging:get_logger", log_level=[None, 10, 0, 55, -5, True, 1.5, b"INFO"])
def logger_level_kinds(log_level: Any) -> Iterator[tuple[str, Any]]:
    yield from logger_of(lambda: get_logger("probed.levels", log_level=log_level))


@probe("logging:get_logger", variable=WORDS, log_level=[None, "ERROR"])
def logger_of_environment(variable: str, log_level: Any) -> Iterator[tuple[str, Any]]:
    os.environ["ACCELERATE_LOG_LEVEL"] = variable
    yield from logger_of(lambda: get_logger("probed.levels", log_level))


@probe("logging:get_logger", name=["a", "a.b", "", "ü", None, 1, "accelerate"])
def logger_names(name: Any) -> Any:
    made = get_logger(name)
    return made.name, made.logger is logging.getLogger(name), type(made).__name__
