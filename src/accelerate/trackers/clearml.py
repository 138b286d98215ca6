"""Tracking with ClearML."""

from typing import Any

from accelerate.trackers.base import LibraryTracker

# A metric's prefix chooses the series of its chart, so that training and evaluation are drawn together.
_SERIES = ("eval", "test", "train")


def _title_and_series(name: str) -> tuple[str, str]:
    prefix, separator, rest = name.partition("_")
    return (rest, prefix) if separator and prefix in _SERIES else (name, "train")


class ClearMLTracker(LibraryTracker):
    """Logs numbers to ClearML, to the current task if there is one.

    With a step they are points of a chart, and without one single values. A name such as ``eval_loss`` is the series
    ``eval`` of the chart ``loss``. ``log`` passes its ``kwargs`` to the logger's ``report_scalar`` or ``report_single_value``.

    Args:
        run_name: Name of the project and of the task.
        **kwargs: Passed to ``clearml.Task.init``.

    Source:
        https://clear.ml/docs/latest/docs/references/sdk/task
    """

    name = library = "clearml"
    handle = "task"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._owns_task = False

    def start(self) -> None:
        """Join the current task, or start one."""
        self.task = self._library().Task.current_task()
        self._owns_task = self.task is None
        if self._owns_task:
            names = {"project_name": self.run_name, "task_name": self.run_name}
            self.task = self._library().Task.init(**{**names, **self.init_kwargs})

    def store_init_configuration(self, values: dict) -> None:
        """Connect the configuration to the task."""
        # A copy: ClearML may write values set in its web page back into what it was given.
        self.task.connect_configuration(dict(values))

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        is_number = isinstance(value, (int, float))
        if is_number and step is None:
            self.task.get_logger().report_single_value(name=name, value=value, **kwargs)
        elif is_number:
            title, series = _title_and_series(name)
            self.task.get_logger().report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        return is_number

    def log_images(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log arrays, PIL images or paths; ``kwargs`` go to the logger's ``report_image``."""
        logger = self.task.get_logger()
        for name, image in values.items():
            title, series = _title_and_series(name)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given by columns and rows or as a pandas frame; neither is a ValueError.

        ``kwargs`` go to the logger's ``report_table``.
        """
        if dataframe is None and data is None:
            raise ValueError(f"log_table({table_name!r}) got no rows: pass `data`, or a pandas frame as `dataframe`.")
        rows = dataframe if dataframe is not None else ([columns, *data] if columns else data)
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=rows, iteration=step, **kwargs)

    def finish(self) -> None:
        """Close the task, unless somebody else started it."""
        if self.task is not None and self._owns_task:
            self.task.close()
