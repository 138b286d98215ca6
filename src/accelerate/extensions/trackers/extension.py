"""The link of a run to its trackers, which it finishes. Nothing else of them is imported in a run without trackers."""

import logging
from typing import Any

from accelerate.extension import Extension

logger = logging.getLogger(__name__)


class Trackers(Extension):
    """Reads `log_with`, and finishes the trackers. It has no state: both lists are the Accelerator's, and programs assign them."""

    order = 90  # others may log as they end

    @classmethod
    def attach(cls, run: Any) -> "Trackers":
        """Replace `log_with` by the list of usable trackers; ValueError for an unknown one."""
        if run.log_with != []:
            from accelerate.extensions.trackers.registry import filter_trackers

            run.log_with = filter_trackers(run.log_with, run.logging_dir)
        return cls(run)

    def ended(self) -> None:
        """Finish every tracker that runs. They stay in ``accelerator.trackers``, for questions to a finished run."""
        run = self.run
        for tracker in running(run):
            if works_here(run, tracker):
                guarded(tracker, "finish", tracker.finish)
        run._finished_trackers = list(run.trackers)


def works_here(run: Any, tracker: Any) -> bool:
    """Return whether a tracker works on this rank: on the main process, or on every rank."""
    return bool(run.is_main_process or not tracker.main_process_only)


def running(run: Any) -> list[Any]:
    """Return the trackers that are not finished."""
    return without(run.trackers, getattr(run, "_finished_trackers", []))


def without(trackers: list[Any], others: list[Any]) -> list[Any]:
    """Return the trackers that are not among others."""
    return [tracker for tracker in trackers if not any(tracker is other for other in others)]


def guarded(tracker: Any, what: str, call: Any, *args: Any, **kwargs: Any) -> None:
    """Call a method of a tracker; an error of it is a warning, since a run must not die of its tracker."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        message = (
            f"The tracker {tracker.name!r} failed in `{what}`; training continues. {type(error).__name__}: {error}"
        )
        logger.warning(message, exc_info=logger.isEnabledFor(logging.DEBUG))
