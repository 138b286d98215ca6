"""Tracking with Comet."""

from collections.abc import Mapping
from typing import Any

from accelerate.trackers.base import LibraryTracker


class CometMLTracker(LibraryTracker):
    """Logs numbers and dicts of numbers to Comet as metrics, and text as other information.

    ``log`` passes its ``kwargs`` to the experiment's ``log_metric``, ``log_metrics`` or ``log_other``.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``comet_ml.start``, or to ``comet_ml.Experiment`` before version 3.41.

    Source:
        https://www.comet.com/docs/v2/api-and-sdk/python-sdk/start/
    """

    name = library = "comet_ml"
    ending = "end"

    def start(self) -> None:
        """Start the experiment."""
        from packaging.version import parse

        comet = self._library()
        # A function that also finds an experiment that is running.
        begin = comet.start if parse(comet.__version__) >= parse("3.41.0") else comet.Experiment
        self.writer = begin(project_name=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration as parameters."""
        self.writer.log_parameters(values)

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log what Comet takes, at the step given or at Comet's own."""
        if step is not None:
            self.writer.set_step(step)
        super().log(values, step=step, **kwargs)

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        if isinstance(value, (int, float)):
            self.writer.log_metric(name, value, step=step, **kwargs)
        elif isinstance(value, str):
            self.writer.log_other(name, value, **kwargs)
        elif isinstance(value, Mapping):
            self.writer.log_metrics(value, step=step, **kwargs)
        return isinstance(value, (int, float, str, Mapping))
