"""What a run does with its trackers: it starts them, logs to them and gives them out.

What goes wrong while a tracker logs or finishes is a warning. What goes wrong while it starts is an error, because then nothing is lost yet.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from accelerate.config.enums import LoggerType
from accelerate.extensions.trackers.base import GeneralTracker
from accelerate.extensions.trackers.extension import Trackers, guarded, running, without, works_here
from accelerate.extensions.trackers.registry import LOGGER_TYPE_TO_CLASS

logger = logging.getLogger(__name__)


def needs_every_rank(run: Any) -> bool:
    """Return whether some tracker works on every rank, so that the calls must reach all of them."""
    return any(not _class_of(choice).main_process_only for choice in (*run.log_with, *run.trackers))


def _from_main_process(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method run on the main process alone, unless one of the trackers works on every rank."""

    def run(*args: Any, **kwargs: Any) -> Any:
        accelerator = args[0]
        if accelerator.is_main_process or needs_every_rank(accelerator):
            return method(*args, **kwargs)
        return None

    # The recorded signature is (*args, **kwargs); the source is that of the method.
    signature = inspect.signature(run)
    functools.update_wrapper(run, method)
    run.__signature__ = signature  # type: ignore[attr-defined]  # for `inspect`
    return run


@_from_main_process
def init_trackers(
    accelerator: Any,
    project_name: str,
    config: dict[str, Any] | None = None,
    init_kwargs: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Start the trackers that ``log_with`` named.

    A tracker that runs already is finished before one of its name is started again. One that was finished is started again.

    Not a collective.

    Args:
        project_name: The project, or run, under which they log.
        config: Hyperparameters to store.
        init_kwargs: For each tracker's name the arguments of its constructor.
    """
    _attach(accelerator)
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
    already = running(accelerator)
    for tracker in without(already, trackers):
        if works_here(accelerator, tracker):
            guarded(tracker, "finish", tracker.finish)
    new = without(trackers, already)
    accelerator.trackers, accelerator._finished_trackers = without(trackers, new), []
    for tracker in new:
        if works_here(accelerator, tracker):
            tracker.start()
        accelerator.trackers.append(tracker)  # at once: where the next one fails, `end_training` finishes this one
    accelerator.trackers = trackers
    if config is not None:
        for tracker in trackers:
            if works_here(accelerator, tracker):
                tracker.store_init_configuration(dict(config))


def get_tracker(accelerator: Any, name: str, unwrap: bool = False) -> Any:
    """Return a started tracker.

    It can be asked after ``end_training()``, too. A rank without trackers gets one that does nothing.

    Not a collective.

    Args:
        name: Its name, such as ``"tensorboard"``.
        unwrap: Whether to return the library's own object.
    """
    _attach(accelerator)
    if not accelerator.trackers:
        return GeneralTracker(_blank=True)
    for tracker in accelerator.trackers:
        if tracker.name == name:
            return tracker.tracker if unwrap else tracker
    started = [tracker.name for tracker in accelerator.trackers]
    raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`; started are {started}.")


@_from_main_process
def log(
    accelerator: Any, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
) -> None:
    """Log a copy of the values to every running tracker.

    Not a collective.

    Args:
        values: The values by name.
        step: The step they belong to.
        log_kwargs: For each tracker's name the arguments of its ``log``.
    """
    _attach(accelerator)
    options = log_kwargs or {}
    for tracker in accelerator.trackers:
        if works_here(accelerator, tracker):
            guarded(tracker, "log", tracker.log, dict(values), step=step, **(options.get(tracker.name) or {}))


def _attach(run: Any) -> None:
    """Let `end_training` finish the trackers also in a copy of the run, which has no extensions."""
    if not run.extensions.of_kind(Trackers):
        run.extensions.add(Trackers(run))


def _class_of(choice: Any) -> Any:
    """Return a tracker's class for a name, or the object itself."""
    if isinstance(choice, GeneralTracker):
        return choice
    return LOGGER_TYPE_TO_CLASS[choice.value if isinstance(choice, LoggerType) else choice]
