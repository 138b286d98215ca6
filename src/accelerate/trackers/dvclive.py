"""Tracking with DVCLive."""

from typing import Any

from accelerate.trackers.base import LibraryTracker, plain


class DVCLiveTracker(LibraryTracker):
    """Logs numbers and text to DVCLive; ``log`` passes its ``kwargs`` to ``log_metric``.

    Args:
        run_name: Not used by DVCLive; here because every tracker takes it.
        live: A ``dvclive.Live`` to log to, instead of a new one.
        **kwargs: Passed to ``dvclive.Live``.

    Source:
        https://dvc.org/doc/dvclive/live
    """

    name = library = "dvclive"
    handle = "live"
    ending = "end"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def start(self) -> None:
        """Start logging."""
        if self.live is None:
            self.live = self._library().Live(**self.init_kwargs)

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration as parameters; what DVCLive cannot store is stored as text."""
        self.live.log_params(plain(values))

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log what DVCLive takes as metrics, and go on to its next step, by default the one after the last."""
        if step is not None:
            self.live.step = step
        super().log(values, step=step, **kwargs)
        self.live.next_step()

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        from dvclive.plots import Metric

        if takes := Metric.could_log(value):
            self.live.log_metric(name, value, **kwargs)
        return takes
