"""Tracking with DVCLive."""

from typing import Any

from accelerate.trackers.base import LibraryTracker, built_in, mention


@built_in
class DVCLiveTracker(LibraryTracker):
    """Logs to DVCLive.

    Args:
        run_name: Not used by DVCLive; here because every tracker takes it.
        live: A ``dvclive.Live`` to log to, instead of a new one.
        **kwargs: Passed to ``dvclive.Live``.

    Source:
        https://dvc.org/doc/dvclive/live
    """

    name = "dvclive"
    handle = "live"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def start(self) -> None:
        """Start logging."""
        if self.live is None:
            from dvclive import Live

            self.live = Live(**self.init_kwargs)

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration as parameters."""
        self.live.log_params(values)

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log what DVCLive can log as metrics, and go on to its next step, by default the one after the last.

        ``kwargs`` go to ``log_metric``.
        """
        from dvclive.plots import Metric

        if step is not None:
            self.live.step = step
        for name, value in values.items():
            if Metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                mention("DVCLive", name, value)
        self.live.next_step()

    def finish(self) -> None:
        """End logging."""
        self.live.end()
