"""The trackers that log a run.

A run must not die of its tracker: what goes wrong while it logs or finishes is a warning. What goes wrong while a tracker
starts is an error, because then nothing is lost yet.
"""

import logging
from typing import Any

from accelerate.config.enums import LoggerType
from accelerate.trackers.base import GeneralTracker
from accelerate.trackers.registry import LOGGER_TYPE_TO_CLASS
from accelerate.training.prepared import Facade

logger = logging.getLogger(__name__)


def needs_every_rank(accelerator: Facade) -> bool:
    """Say whether some tracker works on every rank, so that the calls must reach all of them."""
    return any(not _class_of(choice).main_process_only for choice in (*accelerator.log_with, *accelerator.trackers))


def _class_of(choice: Any) -> Any:
    """Return a tracker's class for a name, or the object itself."""
    if isinstance(choice, GeneralTracker):
        return choice
    return LOGGER_TYPE_TO_CLASS[choice.value if isinstance(choice, LoggerType) else choice]


def init_trackers(
    accelerator: Facade, project_name: str, config: dict[str, Any] | None, init_kwargs: dict[str, dict] | None
) -> None:
    """Start the trackers of ``log_with`` and store the configuration. Each tracker decides on which ranks it works.

    A tracker that runs already is finished before one of its name is started again, so that there are no two runs.
    One that was finished is started again.
    """
    options = init_kwargs or {}
    trackers = []
    for choice in accelerator.log_with:
        kind = _class_of(choice)
        if kind is not choice:
            folder = [accelerator.logging_dir] if kind.requires_logging_directory else []
            choice = kind(project_name, *folder, **(options.get(kind.name) or {}))
        trackers.append(choice)
    unknown = set(options).difference(tracker.name for tracker in trackers)
    if unknown:
        # Scripts pass settings for every tracker they know, and choose one of them on the command line.
        logger.info("init_trackers got settings for %s, which this run does not use.", sorted(unknown))
    running = _without(accelerator.trackers, accelerator._finished_trackers)
    for tracker in _without(running, trackers):
        _guarded(tracker, "finish", tracker.finish)
    for tracker in _without(trackers, running):
        tracker.start()
    accelerator.trackers, accelerator._finished_trackers = trackers, []
    if config is not None:
        for tracker in trackers:
            tracker.store_init_configuration(dict(config))


def _without(trackers: list[GeneralTracker], others: list[GeneralTracker]) -> list[GeneralTracker]:
    return [tracker for tracker in trackers if not any(tracker is other for other in others)]


def get_tracker(accelerator: Facade, name: str, unwrap: bool) -> Any:
    """Return a tracker, or with `unwrap` its library's object; on a rank without trackers one that does nothing."""
    if not accelerator.trackers:
        return GeneralTracker(_blank=True)
    for tracker in accelerator.trackers:
        if tracker.name == name:
            return tracker.tracker if unwrap else tracker
    started = [tracker.name for tracker in accelerator.trackers]
    raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`; started are {started}.")


def log(accelerator: Facade, values: dict[str, Any], step: int | None, log_kwargs: dict[str, dict] | None) -> None:
    """Log a copy of the values to every running tracker, with the arguments that `log_kwargs` has for its name."""
    options = log_kwargs or {}
    for tracker in accelerator.trackers:
        _guarded(tracker, "log", tracker.log, dict(values), step=step, **(options.get(tracker.name) or {}))


def finish(accelerator: Facade) -> None:
    """Finish every tracker that runs. They stay in ``accelerator.trackers``, for questions to a finished run."""
    for tracker in _without(accelerator.trackers, accelerator._finished_trackers):
        _guarded(tracker, "finish", tracker.finish)
    accelerator._finished_trackers = list(accelerator.trackers)


def _guarded(tracker: GeneralTracker, what: str, call: Any, *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except Exception as error:
        message = f"The tracker {tracker.name!r} failed in `{what}`; training goes on. {type(error).__name__}: {error}"
        logger.warning(message, exc_info=logger.isEnabledFor(logging.DEBUG))
