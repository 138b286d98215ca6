"""Tracking with MLflow."""

import types

import pytest

from accelerate.extensions.trackers.libraries import MLflowTracker


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS", "NESTED_RUN"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)


@pytest.fixture
def mlflow(library):
    limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=5, MAX_PARAMS_TAGS_PER_BATCH=2)
    experiments = []

    def search_experiments(filter_string):
        library.calls.append(("search", filter_string))
        return experiments

    library.install("mlflow", utils=types.SimpleNamespace(validation=limits), search_experiments=search_experiments)
    library.experiments = experiments
    return library


def test_a_known_experiment_and_the_default_one(mlflow):
    mlflow.experiments.append(types.SimpleNamespace(experiment_id="7"))
    MLflowTracker("known").start()
    assert mlflow.taken()[-1][2]["experiment_id"] == "7"
    MLflowTracker().start()
    (start,) = mlflow.taken()
    assert start[2]["experiment_id"] is None


def test_the_environment_wins(mlflow, monkeypatch):
    for name, value in (("EXPERIMENT_NAME", "other"), ("RUN_ID", "r"), ("TAGS", '{"a": "b"}'), ("NESTED_RUN", "true")):
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    MLflowTracker("name", tags={"t": 1}).start()
    search, create, start = mlflow.taken()
    assert "other" in search[1] and create[2]["name"] == "other"
    assert (start[2]["run_id"], start[2]["tags"], start[2]["nested"]) == ("r", {"a": "b"}, True)


@pytest.mark.parametrize("tags", ["{", "[1]"])
def test_tags_must_be_a_json_object(tags):
    with pytest.raises(ValueError, match="JSON"):
        MLflowTracker("name", tags=tags)


def test_artifacts(mlflow):
    tracker = MLflowTracker("name")
    tracker.log_figure("figure", "file.png", dpi=3)
    tracker.log_artifact("path", "to")
    tracker.log_artifacts("folder")
    tracker.finish()
    assert [(name, kwargs) for name, _, kwargs in mlflow.taken()] == [
        ("mlflow.log_figure", {"figure": "figure", "artifact_file": "file.png", "dpi": 3}),
        ("mlflow.log_artifact", {"local_path": "path", "artifact_path": "to"}),
        ("mlflow.log_artifacts", {"local_dir": "folder", "artifact_path": None}),
        ("mlflow.end_run", {}),
    ]
