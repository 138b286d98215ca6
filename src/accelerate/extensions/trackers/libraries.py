"""The trackers of this package, one class a library, which is imported when a run starts."""

import json
import logging
import os
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from accelerate.base.environment import parse_flag_from_env
from accelerate.extensions.trackers.library import LibraryTracker, number_or_same, numbers_of, plain

logger = logging.getLogger(__name__)

# A metric's prefix chooses the series of its chart, so that training and evaluation are drawn together.
_SERIES = ("eval", "test", "train")
_HPARAM_TYPES = (int, float, str, bool, torch.Tensor)


class AimTracker(LibraryTracker):
    """Logs numbers and Aim's own objects to an Aim repository; ``log`` passes its ``kwargs`` to the run's ``track``.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of the repository.
        **kwargs: Passed to ``aim.Run``.

    Source:
        https://aimstack.readthedocs.io/en/latest/refs/sdk.html
    """

    name = library = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        """Start the run."""
        self.writer = self._library().Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration with the run; what Aim cannot store is stored as text."""
        self.writer["hparams"] = plain(values)

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        try:
            self.writer.track(value, name=name, step=step, **kwargs)
        except (TypeError, ValueError):
            return False
        return True

    def log_images(self, values: dict, step: int | None = None, kwargs: dict[str, dict] | None = None) -> None:
        """Log images: arrays, PIL images, or pairs of an image and its caption.

        ``kwargs`` has the arguments of ``aim.Image`` under ``"aim_image"``, and those of ``track`` under ``"track"``.
        """
        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = self._library().Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(picture, name=name, step=step, **options.get("track", {}))


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
        """Log what DVCLive takes as metrics, and continue to its next step, by default the one after the last."""
        if step is not None:
            self.live.step = step
        super().log(values, step=step, **kwargs)
        self.live.next_step()

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        from dvclive.plots import Metric

        if takes := Metric.could_log(value):
            self.live.log_metric(name, value, **kwargs)
        return takes


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
        # A copy: ClearML may write values set in its web page back into its argument.
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
        """Close the task, unless other code started it."""
        if self.task is not None and self._owns_task:
            self.task.close()


class TensorBoardTracker(LibraryTracker):
    """Logs to TensorBoard's event files: numbers as scalars, text as text, and dicts of numbers as scalars in one chart.

    ``log`` passes its ``kwargs`` to ``add_scalar``, ``add_text`` or ``add_scalars``.

    Args:
        run_name: Name of the run, and of its folder.
        logging_dir: The folder that holds the runs.
        **kwargs: Passed to ``torch.utils.tensorboard.SummaryWriter``.

    Example:
        >>> import tempfile
        >>> tracker = TensorBoardTracker("first", tempfile.mkdtemp())
        >>> tracker.start()
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.finish()

    Source:
        https://docs.pytorch.org/docs/stable/tensorboard.html
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = os.path.join(logging_dir, run_name)

    def start(self) -> None:
        """Open the event file."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict) -> None:
        """Write the configuration as hyperparameters, and as ``hparams.yml`` in a folder named after the time.

        Values that TensorBoard's table cannot show are shown as text.
        """
        shown = {name: value if isinstance(value, _HPARAM_TYPES) else str(value) for name, value in values.items()}
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()
        import yaml  # a third of what importing the package would cost otherwise

        folder = os.path.join(self.logging_dir, str(time.time()))
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "hparams.yml"), "w", encoding="utf-8") as file:
            yaml.safe_dump(plain(values), file)

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log what TensorBoard takes, and write it out."""
        super().log(values, step=step, **kwargs)
        self.writer.flush()

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        if isinstance(value, str):
            self.writer.add_text(name, value, global_step=step, **kwargs)
        elif isinstance(value, Mapping):
            self.writer.add_scalars(name, numbers_of(value, f"TensorBoard ({name})"), global_step=step, **kwargs)
        elif isinstance(value, (int, float)):
            self.writer.add_scalar(name, value, global_step=step, **kwargs)
        return isinstance(value, (int, float, str, Mapping))

    def log_images(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log tensors or arrays of shape (N, C, H, W), or as ``dataformats`` says; ``kwargs`` go to ``add_images``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)


class MLflowTracker(LibraryTracker):
    """Logs to MLflow.

    The environment variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (JSON) and MLFLOW_NESTED_RUN override the
    arguments.

    Args:
        experiment_name: Name of the experiment; MLflow's default one when it is None.
        logging_dir: The place of a new experiment's artifacts.
        run_id: A run to continue.
        tags: Tags of the run and of a new experiment: a dict, or JSON text.
        nested_run: Start the run inside the one that is active.
        run_name: Name of the run.
        description: Description of the run.

    Source:
        https://mlflow.org/docs/latest/api_reference/python_api/mlflow.html
    """

    name = library = "mlflow"
    handle = "active_run"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        tags = os.environ.get("MLFLOW_TAGS", tags)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = _tags(tags) if isinstance(tags, str) else tags
        self.nested_run = parse_flag_from_env("MLFLOW_NESTED_RUN", bool(nested_run))
        self.description = description

    def start(self) -> None:
        """Find or make the experiment and start the run."""
        self.active_run = self._library().start_run(
            run_id=self.run_id,
            experiment_id=self._experiment(self._library()),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self, mlflow: Any) -> str | None:
        if self.experiment_name is None:
            return None
        quoted = self.experiment_name.replace("'", "\\'")
        experiments = mlflow.search_experiments(filter_string=f"name = '{quoted}'")
        if len(experiments) > 0:
            return experiments[0].experiment_id
        return mlflow.create_experiment(
            name=self.experiment_name,
            artifact_location=os.fspath(self.logging_dir) if self.logging_dir is not None else None,
            tags=self.tags,
        )

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration as parameters; values too long for MLflow are skipped, with a warning."""
        limits = self._library().utils.validation
        longest = limits.MAX_PARAM_VAL_LENGTH
        for name in (name for name, value in values.items() if len(str(value)) > longest):
            logger.warning("MLflow takes parameters of up to %d characters; %r is longer, not stored.", longest, name)
        items = iter((name, value) for name, value in values.items() if len(str(value)) <= longest)
        while batch := dict(islice(items, limits.MAX_PARAMS_TAGS_PER_BATCH)):
            self._library().log_params(batch)

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics; ``kwargs`` go to ``mlflow.log_metrics``."""
        self._library().log_metrics(numbers_of(values, "MLflow"), step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a matplotlib or plotly figure as an artifact within the run; ``kwargs`` go to ``mlflow.log_figure``."""
        self._library().log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file as an artifact, in a folder within the run."""
        self._library().log_artifact(local_path=local_path, artifact_path=artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log the files of a folder as artifacts, in a folder within the run."""
        self._library().log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def finish(self) -> None:
        """End the run."""
        self._library().end_run()


def _tags(text: str) -> dict[str, Any]:
    try:
        tags = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"MLflow's tags are not valid JSON: {text!r} ({error}).") from error
    if not isinstance(tags, dict):
        raise ValueError(f"MLflow's tags are a JSON object of names and values, but got {text!r}.")
    return tags


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
            self.log({name: [image(picture) for picture in images]}, step=step, **kwargs)


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
