"""Tracking with SwanLab."""

from typing import Any

from accelerate.trackers.base import PUBLIC_PATH, GeneralTracker, on_main_process


class SwanLabTracker(GeneralTracker):
    """Logs to SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``swanlab.init``; ``experiment_name`` names the run.

    Source:
        https://docs.swanlab.cn/en/api/py-init.html
    """

    __module__ = PUBLIC_PATH

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``swanlab`` run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        import swanlab

        self.run = swanlab.init(project=self.run_name, **self.init_kwargs)
        swanlab.config["FRAMEWORK"] = "Accelerate"

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run.

        Args:
            values: Names and values.
        """
        import swanlab

        swanlab.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log values of any kind that the library takes.

        Args:
            values: Names and values.
            step: The step they belong to.
            **kwargs: Passed to the run's ``log``.
        """
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: Names, and for each a list of images: arrays, PIL images or paths.
            step: The step they belong to.
            **kwargs: Passed to the run's ``log``.
        """
        import swanlab

        for name, images in values.items():
            self.log({name: [swanlab.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
