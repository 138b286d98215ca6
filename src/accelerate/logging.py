"""Loggers that log once per run instead of once per process, as text or as lines of JSON."""

import datetime
import functools
import json
import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

from accelerate import comm
from accelerate.base import _lazy
from accelerate.config import env
from accelerate.runtime import storage

__getattr__ = _lazy.aliases(__name__)


def _tag() -> str:
    return f"[RANK {storage.process.current.get('process_index')}] "


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: an object with time, level, logger, rank, world_size, file, line, message and exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; the message is without the rank, which is a field."""
        process = storage.process.current
        fields = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc).isoformat(
                timespec="microseconds"
            ),
            "level": record.levelname,
            "logger": record.name,
            "rank": process.get("process_index"),
            "world_size": process.get("num_processes"),
            "file": record.pathname,
            "line": record.lineno,
            "message": record.getMessage().removeprefix(_tag()),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps(fields)


@functools.cache
def _choose_format() -> None:
    """Write the messages of all loggers as JSON if ACCELERATE_LOG_FORMAT asks for it: into a file of the rank, or to the terminal."""
    word = os.environ.get("ACCELERATE_LOG_FORMAT", "").strip().lower()
    if word not in ("", "text", "json"):
        raise ValueError(f"ACCELERATE_LOG_FORMAT is {word!r}; set it to json or text.")
    if word != "json":
        return
    root, folder = logging.getLogger(), env.value_of("log_dir")
    if folder is not None:
        path = os.path.join(folder, f"rank_{storage.process.current['process_index']}.jsonl")
        try:
            os.makedirs(folder, exist_ok=True)
            handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
        except OSError as error:  # a log is no reason to end a run
            text = "%sContinues without a log as JSON: the folder of --log_dir (ACCELERATE_LOG_DIR) is %r, where %s. Name another one."
            logging.getLogger(__name__).warning(text, _tag(), folder, error)
            return
        if not root.handlers:  # then Python prints warnings by this one, until there is another
            root.addHandler(logging.lastResort)
    else:
        terminal = (sys.stdout, sys.stderr)
        handlers = [handler for handler in root.handlers if getattr(handler, "stream", None) in terminal]
        handlers = handlers or [logging.StreamHandler()]
    for handler in handlers:
        handler.setFormatter(JsonFormatter())
        root.addHandler(handler)  # which skips handlers that it has


def _count_frames_of_logging(level: int) -> int:
    """Return the caller's `stacklevel` for Python 3.10, which counts frames of `logging`. Newer releases skip them."""
    frame, steps = sys._getframe(1), 1
    while steps < level and frame.f_back is not None:
        frame, steps = frame.f_back, steps + 1
        level += frame.f_globals is vars(logging)
    return level


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger whose methods take two more arguments.

    - `main_process_only` (default True): log on the main process only.
    - `in_order` (default False): log on all processes, one after the other. Every rank must call it then.

    Each message starts with the rank that logs it, which `process` puts there; a subclass may override that.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message with a level; arguments as for `logging.Logger.log`, and those of this class.

        Raises:
            RuntimeError: no state was built yet, so the process does not know its rank.
        """
        state = storage.process.current
        if not state:
            raise RuntimeError(
                "This logger needs to know which process it runs in. Build `Accelerator()` or `PartialState()` before it logs."
            )
        _choose_format()  # not before: programs set their handlers up after they have imported this
        main_process_only = kwargs.pop("main_process_only", True)
        if kwargs.pop("in_order", False):
            communicator = comm.for_type(state["distributed_type"])
            for turn in range(state["num_processes"]):
                if turn == state["process_index"]:
                    self._emit(level, msg, args, kwargs)
                communicator.barrier()
        elif self._should_log(main_process_only):
            self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
            msg, kwargs = self.process(msg, kwargs)
            # A level counts `log` itself, as that of the upstream package does; 2 is the caller. The logger counts `_emit`, too.
            frames = 2 if isinstance(self.logger, MultiProcessAdapter) else 1
            kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2) + frames
            if sys.version_info < (3, 11) and frames == 1:
                kwargs["stacklevel"] = _count_frames_of_logging(kwargs["stacklevel"])
            self.logger.log(level, msg, *args, **kwargs)

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        """Return whether this rank logs. A subclass may override it."""
        return not main_process_only or storage.process.current["process_index"] == 0

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return message and arguments as the logger takes them: with the rank, and an `extra` joined to the adapter's own."""
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return f"{_tag()}{msg}", kwargs

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - loggers live as long as the process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, but only the first time that these arguments are given."""
        self.warning(*args, **{"stacklevel": 3, **kwargs})  # past this frame


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger that knows the processes of the run.

    With ACCELERATE_LOG_FORMAT=json, every message of any logger of the process is written as one JSON object per line, from
    the first message on. They go to ``rank_<rank>.jsonl`` in the folder of ``--log_dir`` (ACCELERATE_LOG_DIR), or to the
    terminal instead of text.

    Not a collective.

    Args:
        name: usually `__name__`.
        log_level: the level to set on the logger and the root logger; None reads ACCELERATE_LOG_LEVEL, else changes nothing.

    Raises:
        ValueError: there is no such level.

    Example:
        >>> from accelerate import PartialState
        >>> from accelerate.logging import get_logger
        >>> state, logger = PartialState(), get_logger(__name__)
        >>> logger.warning("once per run")
        >>> logger.warning("once per process", main_process_only=False)
    """
    if log_level is None:
        log_level = os.environ.get("ACCELERATE_LOG_LEVEL", "").strip() or None
    logger = logging.getLogger(name)
    if log_level is not None:
        level = log_level.upper() if isinstance(log_level, str) else log_level
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})
