"""Tracking with Comet."""

from collections.abc import Mapping
from typing import Any

from accelerate.trackers.base import LibraryTracker, as_number, built_in, mention


@built_in
class CometMLTracker(LibraryTracker):
    """Logs to Comet.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``comet_ml.start``, or to ``comet_ml.Experiment`` before version 3.41.

    Source:
        https://www.comet.com/docs/v2/api-and-sdk/python-sdk/start/
    """

    name = library = "comet_ml"

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
        """Log numbers and dicts of numbers as metrics, text as other information.

        ``kwargs`` go to the experiment's ``log_metric``, ``log_metrics`` or ``log_other``.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                self.writer.log_metric(name, number, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                mention("Comet", name, value)

    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()
