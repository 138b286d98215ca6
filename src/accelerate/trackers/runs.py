"""Tracking with Weights & Biases, SwanLab and Trackio, whose libraries work alike: a module with `init` and `config`, and a run."""

import importlib
from typing import Any

from accelerate.trackers.base import LibraryTracker, built_in


@built_in
class RunTracker(LibraryTracker):
    """The base of trackers for libraries that are called like their trackers and return a run; every rank may log.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to the library's ``init``.
    """

    handle = "run"
    main_process_only = False

    def start(self) -> None:
        """Start the run."""
        self.run = self._library().init(project=self.run_name, **self.init_kwargs)

    def _library(self) -> Any:
        return importlib.import_module(self.name)

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run.

        Args:
            values: Names and values.
        """
        self._library().config.update(values, allow_val_change=True)

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log values of any kind that the library takes.

        Args:
            values: Names and values.
            step: The step they belong to.
            **kwargs: Passed to the run's ``log``.
        """
        self.run.log(values, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.run.finish()


@built_in
class TrackioTracker(RunTracker):
    """Logs to Trackio.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``trackio.init``; ``name`` names the run.

    Source:
        https://huggingface.co/docs/trackio
    """

    name = "trackio"


@built_in
class _ImageTracker(RunTracker):
    """The base of those whose library has images."""

    def log_images(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: Names, and for each a list of images: arrays, PIL images or paths.
            step: The step they belong to.
            **kwargs: Passed to the run's ``log``.
        """
        image = self._library().Image
        for name, images in values.items():
            self.log({name: [image(one) for one in images]}, step=step, **kwargs)


@built_in
class SwanLabTracker(_ImageTracker):
    """Logs to SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``swanlab.init``; ``experiment_name`` names the run.

    Source:
        https://docs.swanlab.cn/en/api/py-init.html
    """

    name = "swanlab"

    def start(self) -> None:
        """Start the run."""
        super().start()
        self._library().config["FRAMEWORK"] = "Accelerate"


@built_in
class WandBTracker(_ImageTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``wandb.init``; ``name`` names the run.

    Source:
        https://docs.wandb.ai/ref/python/
    """

    name = "wandb"

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
        table = self._library().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)
