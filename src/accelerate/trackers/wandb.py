"""Tracking with Weights & Biases."""

from typing import Any

from accelerate.trackers.base import PUBLIC_PATH, GeneralTracker, on_main_process


class WandBTracker(GeneralTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``wandb.init``; ``name`` names the run.

    Source:
        https://docs.wandb.ai/ref/python/
    """

    __module__ = PUBLIC_PATH

    name = "wandb"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``wandb`` run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        import wandb

        self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run.

        Args:
            values: Names and values.
        """
        import wandb

        wandb.config.update(values, allow_val_change=True)

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
        import wandb

        for name, images in values.items():
            self.log({name: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given by columns and rows or as a pandas frame.

        Args:
            table_name: Its name.
            columns: Names of the columns.
            data: The rows.
            dataframe: A pandas frame instead of the two.
            step: The step it belongs to.
            **kwargs: Passed to the run's ``log``.
        """
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
