"""Names of trackers, which of them can be used, and how ``log_with`` is read."""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.base import _lazy
from accelerate.config.enums import LoggerType
from accelerate.extensions.trackers import available, libraries
from accelerate.extensions.trackers.base import GeneralTracker

logger = logging.getLogger(__name__)

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    tracker.name: tracker
    for tracker in (
        libraries.AimTracker,
        libraries.CometMLTracker,
        libraries.MLflowTracker,
        libraries.TensorBoardTracker,
        libraries.WandBTracker,
        libraries.ClearMLTracker,
        libraries.DVCLiveTracker,
        libraries.SwanLabTracker,
        libraries.TrackioTracker,
    )
}

# Whether the library of each tracker is installed, in the order of "all"; a registered tracker answers for itself.
_AVAILABLE: dict[str, Callable[[], bool]] = {
    name: getattr(available, f"is_{name}_available")
    for name in ["tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"]
}

Choice = str | LoggerType | GeneralTracker


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker of your own available to ``log_with`` by its name, before a built-in one of that name.

    Raises:
        ValueError: It is no subclass of ``GeneralTracker``, or lacks a ``name`` or ``requires_logging_directory``.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class!r}.")
    name = getattr(tracker_class, "name", None)
    if not name or not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"{tracker_class.__name__} has name={name!r}. Define `name`, a text that is not empty, and "
            "`requires_logging_directory`, True or False, in the class."
        )
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"The tracker name {name!r} belonged to {LOGGER_TYPE_TO_CLASS[name]} and now belongs to {tracker_class}.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class
    _AVAILABLE.pop(name, None)


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose library is installed.

    Example:
        >>> from accelerate.tracking import get_available_trackers
        >>> isinstance(get_available_trackers(), list)  # of those whose package is installed
        True
    """
    return [LoggerType(name) for name, available in _AVAILABLE.items() if available()]


__getattr__ = _lazy.aliases(__name__, {"_available_trackers": get_available_trackers})


def filter_trackers(
    log_with: Choice | Sequence[Choice] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[Any]:
    """Return the usable trackers among the requested ones, each once, in their order.

    Args:
        log_with: Names, ``"all"`` for every installed one, or tracker objects; one or a sequence of them. With ``"all"``
            tracker objects come first.
        logging_dir: The folder for trackers that need one.

    Returns:
        LoggerType members of built-in trackers, names of registered ones, and tracker objects.

    Raises:
        ValueError: A name is unknown, or a tracker needs a folder and there is none.

    Example:
        >>> filter_trackers(None)
        []
    """
    if log_with is None:
        return []
    chosen: dict[str | int, Any] = {}
    everything: list[str] = []
    for item in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        if isinstance(item, GeneralTracker):
            chosen.setdefault(id(item), item)
            continue
        name = item.value if isinstance(item, LoggerType) else item
        if name == LoggerType.ALL.value:
            everything = [member.value for member in get_available_trackers()]
        elif not isinstance(name, str) or name not in LOGGER_TYPE_TO_CLASS:
            choices = [LoggerType.ALL.value, *LOGGER_TYPE_TO_CLASS]
            raise ValueError(
                f"log_with got {item!r}; choose among {choices}, or pass an object of a `GeneralTracker` class."
            )
        elif not _AVAILABLE.get(name, lambda: True)():
            logger.warning("log_with asks for %r, but its library is not installed; nothing is logged there.", name)
        elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
            raise ValueError(
                f"The tracker {name!r} needs a folder to log to: pass project_dir, or a ProjectConfiguration with "
                "logging_dir, to the Accelerator."
            )
        else:
            chosen.setdefault(name, LoggerType(name) if name in LoggerType else name)
    for name in everything:  # after the caller's, in a fixed order
        chosen.pop(name, None)
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
            logger.warning("log_with='all' skips %r, which needs a logging_dir.", name)
        else:
            chosen[name] = LoggerType(name)
    return list(chosen.values())
