"""Names of trackers, and how log_with is read."""

import pytest

from accelerate.config.enums import LoggerType
from accelerate.extensions.trackers import registry
from accelerate.extensions.trackers.base import GeneralTracker


class Own(GeneralTracker):
    name = "own"
    requires_logging_directory = False
    tracker = None


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Only TensorBoard and Weights & Biases are installed, whatever this machine has."""
    there = {"tensorboard", "wandb"}
    available = {name: (lambda name=name: name in there) for name in registry._AVAILABLE}
    monkeypatch.setattr(registry, "_AVAILABLE", available)
    monkeypatch.setattr(registry, "LOGGER_TYPE_TO_CLASS", dict(registry.LOGGER_TYPE_TO_CLASS))


def test_log_with(tmp_path):
    own = Own()
    assert registry.filter_trackers(None) == []
    assert registry.filter_trackers("wandb") == [LoggerType.WANDB]
    assert registry.filter_trackers(LoggerType.WANDB) == [LoggerType.WANDB]
    assert registry.filter_trackers([own, "wandb", "wandb", own]) == [own, LoggerType.WANDB]
    assert registry.filter_trackers(own) == [own]
    assert registry.filter_trackers("all", tmp_path) == [LoggerType.TENSORBOARD, LoggerType.WANDB]
    assert registry.filter_trackers(["wandb", "all", own], tmp_path) == [own, LoggerType.TENSORBOARD, LoggerType.WANDB]


@pytest.mark.parametrize(
    ("choice", "message"),
    [("tensorboard", "tensorboard.*project_dir"), *((choice, "comet_ml") for choice in ("foo", Own, 3))],
)
def test_refused_choices(choice, message):
    with pytest.raises(ValueError, match=message):
        registry.filter_trackers(choice)


def test_what_is_left_out_is_said(caplog):
    assert registry.filter_trackers("all") == [LoggerType.WANDB] and registry.filter_trackers("mlflow") == []
    assert "skips 'tensorboard'" in caplog.text and "'mlflow'" in caplog.text


def test_registration():
    registry.register_tracker_class(Own)
    assert registry.filter_trackers("own") == ["own"]

    Again = type("Again", (Own,), {})
    with pytest.warns(UserWarning, match="own"):
        registry.register_tracker_class(Again)
    assert registry.LOGGER_TYPE_TO_CLASS["own"] is Again
    with pytest.raises(ValueError, match="subclass"):
        registry.register_tracker_class(Own())
    with pytest.warns(UserWarning):  # it stands in for a built-in one
        registry.register_tracker_class(type("Mlflow", (Own,), {"name": "mlflow"}))
    assert registry.filter_trackers("mlflow") == [LoggerType.MLFLOW]


@pytest.mark.parametrize("attributes", [{"requires_logging_directory": True}, {"name": ""}, {"name": "own"}])
def test_a_class_that_lacks_a_definition_is_not_registered(attributes):
    with pytest.raises(ValueError, match=r"Lacking has name=.*requires_logging_directory"):
        registry.register_tracker_class(type("Lacking", (GeneralTracker,), attributes))
