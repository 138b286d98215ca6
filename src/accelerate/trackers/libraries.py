"""Tracking with Weights & Biases, SwanLab and Trackio, whose libraries work alike: a module with `init` and `config`, and a run."""

from typing import Any

from accelerate.trackers.base import LibraryTracker, number_or_same


class RunTracker(LibraryTracker):
    """The base of trackers for libraries that are called like their trackers and return a run; every rank may log."""

    handle = "run"
    ending = "finish"
    main_process_only = False

    def start(self) -> None:
        """Start the run."""
        self.run = self._library().init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run."""
        self._library().config.update(values, allow_val_change=True)

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log values of any kind that the library takes; ``kwargs`` go to the run's ``log``."""
        self.run.log({name: number_or_same(value) for name, value in values.items()}, step=step, **kwargs)


class TrackioTracker(RunTracker):
    """Logs to Trackio.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``trackio.init``; ``name`` names the run.

    Source:
        https://huggingface.co/docs/trackio
    """

    name = library = "trackio"


class _ImageTracker(RunTracker):
    """The base of those whose library has images."""

    def log_images(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images (arrays, PIL images or paths) for each name; ``kwargs`` go to the run's ``log``."""
        image = self._library().Image
        for name, images in values.items():
            self.log({name: [image(one) for one in images]}, step=step, **kwargs)


class SwanLabTracker(_ImageTracker):
    """Logs to SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``swanlab.init``; ``experiment_name`` names the run.

    Source:
        https://docs.swanlab.cn/en/api/py-init.html
    """

    name = library = "swanlab"

    def start(self) -> None:
        """Start the run."""
        super().start()
        self._library().config["FRAMEWORK"] = "Accelerate"


class WandBTracker(_ImageTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: Name of the project.
        **kwargs: Passed to ``wandb.init``; ``name`` names the run.

    Source:
        https://docs.wandb.ai/ref/python/
    """

    name = library = "wandb"

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given by columns and rows or as a pandas frame; ``kwargs`` go to the run's ``log``."""
        table = self._library().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)
