"""Tracking with Trackio."""

from typing import Any

from accelerate.trackers.base import PUBLIC_PATH, GeneralTracker, on_main_process


class TrackioTracker(GeneralTracker):
    """Logs to Trackio.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``trackio.init``; ``name`` names the run.

    Source:
        https://huggingface.co/docs/trackio
    """

    __module__ = PUBLIC_PATH

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``trackio`` run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        import trackio

        self.run = trackio.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run.

        Args:
            values: Names and values.
        """
        import trackio

        trackio.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log values.

        Args:
            values: Names and values.
            step: The step they belong to.
            **kwargs: Passed to the run's ``log``.
        """
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
