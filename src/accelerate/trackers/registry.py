"""Names of trackers, which of them can be used, and how ``log_with`` is read."""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.config.enums import LoggerType
from accelerate.trackers.aim import AimTracker
from accelerate.trackers.base import GeneralTracker
from accelerate.trackers.clearml import ClearMLTracker
from accelerate.trackers.comet import CometMLTracker
from accelerate.trackers.dvclive import DVCLiveTracker
from accelerate.trackers.mlflow import MLflowTracker
from accelerate.trackers.swanlab import SwanLabTracker
from accelerate.trackers.tensorboard import TensorBoardTracker
from accelerate.trackers.trackio import TrackioTracker
from accelerate.trackers.wandb import WandBTracker
from accelerate.utils import imports

logger = logging.getLogger(__name__)

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    tracker.name: tracker
    for tracker in (
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        WandBTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
    )
}

# Whether the library of each built-in tracker is installed, in the order of "all"; a registered tracker answers for itself.
_AVAILABLE: dict[str, Callable[[], bool]] = {
    LoggerType.TENSORBOARD.value: imports.is_tensorboard_available,
    LoggerType.WANDB.value: imports.is_wandb_available,
    LoggerType.COMETML.value: imports.is_comet_ml_available,
    LoggerType.AIM.value: imports.is_aim_available,
    LoggerType.MLFLOW.value: imports.is_mlflow_available,
    LoggerType.CLEARML.value: imports.is_clearml_available,
    LoggerType.DVCLIVE.value: imports.is_dvclive_available,
    LoggerType.SWANLAB.value: imports.is_swanlab_available,
    LoggerType.TRACKIO.value: imports.is_trackio_available,
}

Choice = str | LoggerType | GeneralTracker


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker of your own available to ``log_with`` by its name.

    Args:
        tracker_class: A subclass of ``GeneralTracker``. It can also be used as a decorator's argument; nothing is
            returned. A registered name takes precedence over a built-in one.

    Raises:
        ValueError: It is no such class, or lacks a ``name`` or ``requires_logging_directory``.
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


def is_tracker_available(name: str) -> bool:
    """Say whether a tracker's library is installed.

    Args:
        name: A key of ``LOGGER_TYPE_TO_CLASS``.
    """
    return _AVAILABLE.get(name, lambda: True)()


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose library is installed."""
    return [LoggerType(name) for name, available in _AVAILABLE.items() if available()]


def filter_trackers(
    log_with: Choice | Sequence[Choice] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[Any]:
    """Return the trackers that can be used out of those asked for, each once, in their order.

    Args:
        log_with: Names, ``"all"`` for every installed one, or trackers of your own; one or a sequence of them. With
            ``"all"`` trackers of your own come first.
        logging_dir: Where trackers log that need a folder.

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
    everything = False
    for item in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        if isinstance(item, GeneralTracker):
            chosen.setdefault(id(item), item)
            continue
        name = item.value if isinstance(item, LoggerType) else item
        if name == LoggerType.ALL.value:
            everything = True
        elif not isinstance(name, str) or name not in LOGGER_TYPE_TO_CLASS:
            known = [LoggerType.ALL.value, *LOGGER_TYPE_TO_CLASS]
            raise ValueError(
                f"log_with got {item!r}; choose among {known}, or pass an object of a `GeneralTracker` class."
            )
        elif not is_tracker_available(name):
            logger.warning("log_with asks for %r, but its library is not installed; nothing is logged there.", name)
        elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
            raise ValueError(
                f"The tracker {name!r} needs a folder to log to: pass project_dir, or a ProjectConfiguration with "
                "logging_dir, to the Accelerator."
            )
        else:
            chosen.setdefault(name, _public(name))
    if everything:
        usable = _all_usable(logging_dir)
        return [*(item for name, item in chosen.items() if name not in usable), *map(_public, usable)]
    return list(chosen.values())


def _all_usable(logging_dir: str | os.PathLike[str] | None) -> list[str]:
    usable = []
    for member in get_available_trackers():
        if LOGGER_TYPE_TO_CLASS[member.value].requires_logging_directory and logging_dir is None:
            logger.warning("log_with='all' leaves out %r, which needs a logging_dir.", member.value)
        else:
            usable.append(member.value)
    return usable


def _public(name: str) -> LoggerType | str:
    try:
        return LoggerType(name)
    except ValueError:
        return name
