"""Tracking with MLflow."""

import json
import logging
import os
from itertools import islice
from typing import Any

from accelerate.trackers.base import LibraryTracker, numbers_of
from accelerate.utils.environment import parse_flag_from_env

logger = logging.getLogger(__name__)


class MLflowTracker(LibraryTracker):
    """Logs to MLflow.

    The environment variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS (JSON) and MLFLOW_NESTED_RUN win over
    the arguments.

    Args:
        experiment_name: Name of the experiment; MLflow's default one when it is None.
        logging_dir: Where a new experiment keeps its artifacts.
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
        found = mlflow.search_experiments(filter_string=f"name = '{quoted}'")
        if len(found) > 0:
            return found[0].experiment_id
        return mlflow.create_experiment(
            name=self.experiment_name,
            artifact_location=os.fspath(self.logging_dir) if self.logging_dir is not None else None,
            tags=self.tags,
        )

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration as parameters; those longer than MLflow takes are left out, with a warning."""
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
