"""Tracking with Aim, ClearML, Comet, DVCLive, MLflow, SwanLab, Trackio and Weights & Biases: what is called on their libraries."""

import types

import pytest

from accelerate import Accelerator, tracking
from accelerate.config.enums import LoggerType
from accelerate.extensions.trackers import base, libraries, run


def test_an_aim_run(library, tmp_path):
    library.install("aim")
    tracker = libraries.AimTracker("run", logging_dir=tmp_path, experiment="e")
    tracker.start()
    assert library.taken() == [
        ("aim.Run", (), {"repo": tmp_path, "experiment": "e"}),
        ("aim.Run().name =", ("run",), {}),
    ]
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3, context={"subset": "train"})
    options = {"aim_image": {"format": "png"}, "track": {"context": {}}}
    tracker.log_images({"a": ("image", "caption")}, step=2, kwargs=options)
    tracker.finish()
    assert library.taken() == [
        ("aim.Run()['hparams'] =", ({"lr": 0.1},), {}),
        ("aim.Run().track", (0.5,), {"name": "loss", "step": 3, "context": {"subset": "train"}}),
        ("aim.Image", ("image",), {"caption": "caption", "format": "png"}),
        ("aim.Run().track", ("<aim.Image()>",), {"name": "a", "step": 2, "context": {}}),
        ("aim.Run().close", (), {}),
    ]


def test_what_aim_refuses_is_left_out_alone(caplog):
    def track(value, **kwargs):
        float(value)  # as strict as the library
        seen.append(value)

    seen, tracker = [], libraries.AimTracker("run")
    tracker.writer = types.SimpleNamespace(track=track)
    tracker.log({"bad": [1], "text": "x", "good": 1})
    assert seen == [1] and "'bad' is a list" in caplog.text and "'text' is a str" in caplog.text


def start_clearml(library, running):
    recorder = library.install("source").task

    class Task:
        @staticmethod
        def current_task():
            return recorder if running else None

        @staticmethod
        def init(**kwargs):
            library.calls.append(("init", kwargs))
            return recorder

    library.install("clearml", Task=Task)
    tracker = libraries.ClearMLTracker("run", project_name="p")
    tracker.start()
    return tracker


def test_a_clearml_task_of_ones_own_is_closed_and_a_running_one_joined(library):
    tracker = start_clearml(library, running=False)
    assert library.taken() == [("init", {"project_name": "p", "task_name": "run"})]
    tracker.finish()
    assert library.taken() == [("source.task.close", (), {})]
    tracker = start_clearml(library, running=True)
    tracker.finish()
    assert library.taken() == [] and tracker.tracker == "<source.task>"
    config = {"lr": 0.1}
    tracker.store_init_configuration(config)
    ((_, (given,), _),) = library.taken()
    assert given == config and given is not config


def test_clearml_images(library):
    tracker = start_clearml(library, running=True)
    tracker.log_images({"test_x": "image"}, step=2)
    assert library.taken()[-1][2] == {"title": "x", "series": "test", "iteration": 2, "image": "image"}


@pytest.mark.parametrize(("version", "begin"), [("3.41.0", "start"), ("3.40.9", "Experiment")])
def test_comet_is_started_as_the_version_wants(library, version, begin):
    library.install("comet_ml", __version__=version)
    tracker = libraries.CometMLTracker("project", workspace="w")
    tracker.start()
    tracker.log({"note": "x", "many": [1]}, step=3)
    tracker.finish()
    assert library.taken() == [
        (f"comet_ml.{begin}", (), {"project_name": "project", "workspace": "w"}),
        (f"comet_ml.{begin}().set_step", (3,), {}),
        (f"comet_ml.{begin}().log_other", ("note", "x"), {}),
        (f"comet_ml.{begin}().end", (), {}),
    ]


def fake_dvclive(library):
    library.install("dvclive")

    class Metric:
        @staticmethod
        def could_log(value):
            return isinstance(value, float)

    library.install("dvclive.plots", Metric=Metric)


def test_a_dvclive_run(library, caplog):
    fake_dvclive(library)
    tracker = libraries.DVCLiveTracker("run", dir="folder")
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5, "note": "x"}, step=3)
    tracker.finish()
    assert library.taken() == [
        ("dvclive.Live", (), {"dir": "folder"}),
        ("dvclive.Live().log_params", ({"lr": 0.1},), {}),
        ("dvclive.Live().step =", (3,), {}),
        ("dvclive.Live().log_metric", ("loss", 0.5), {}),
        ("dvclive.Live().next_step", (), {}),
        ("dvclive.Live().end", (), {}),
    ]
    assert "'note'" in caplog.text
    live = object()  # of your own
    tracker = libraries.DVCLiveTracker(live=live)
    tracker.start()
    assert tracker.tracker is live and library.taken() == []


@pytest.mark.parametrize("tracker_class", [libraries.SwanLabTracker, libraries.TrackioTracker, libraries.WandBTracker])
def test_a_run(library, tracker_class):
    name = tracker_class.name
    library.install(name)
    tracker = type("Own", (tracker_class,), {"name": "whatever it is called"})("project", name="run")
    assert library.taken() == [] and tracker.tracker is None
    tracker.start()
    begun = [(f"{name}.init", (), {"project": "project", "name": "run"})]
    if name == "swanlab":
        begun.append(("swanlab.config['FRAMEWORK'] =", ("Accelerate",), {}))
    assert library.taken() == begun
    assert tracker.tracker == f"<{name}.init()>"
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5, "note": "x"}, step=3, commit=False)
    tracker.finish()
    assert library.taken() == [
        (f"{name}.config.update", ({"lr": 0.1},), {"allow_val_change": True}),
        (f"{name}.init().log", ({"loss": 0.5, "note": "x"},), {"step": 3, "commit": False}),
        (f"{name}.init().finish", (), {}),
    ]
    assert tracker_class.main_process_only is False, "every rank may log"
    assert tracker_class.requires_logging_directory is False


@pytest.mark.parametrize("tracker_class", [libraries.SwanLabTracker, libraries.WandBTracker])
def test_images(library, tracker_class):
    library.install(tracker_class.name)
    tracker = tracker_class("project")
    tracker.start()
    library.taken()
    tracker.log_images({"pictures": ["one", "two"]}, step=2, commit=False)
    *images, logged = library.taken()
    assert [call[1:] for call in images] == [(("one",), {}), (("two",), {})]
    assert logged[1:] == (({"pictures": [f"<{tracker_class.name}.Image()>"] * 2},), {"step": 2, "commit": False})


def test_other_ranks_call_no_library(monkeypatch):
    monkeypatch.setattr(base, "PartialState", lambda: type("State", (), {"is_main_process": False})())
    tracker = tracking.CometMLTracker("project")
    assert tracker.start() is tracker.log({"loss": 1}) is tracker.store_init_configuration({}) is tracker.finish()
    assert tracker.tracker is None


def test_some_trackers_need_every_rank():
    accelerator = Accelerator(cpu=True)
    for choice, needed in ((LoggerType.MLFLOW, False), (LoggerType.WANDB, True)):
        accelerator.log_with = [choice]
        assert run.needs_every_rank(accelerator) is needed


@pytest.fixture
def mlflow(library, monkeypatch):
    for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS", "NESTED_RUN"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=5, MAX_PARAMS_TAGS_PER_BATCH=2)
    experiments = []

    def search_experiments(filter_string):
        library.calls.append(("search", filter_string))
        return experiments

    library.install("mlflow", utils=types.SimpleNamespace(validation=limits), search_experiments=search_experiments)
    library.experiments = experiments
    return library


def test_a_known_experiment_of_mlflow_and_the_default_one(mlflow):
    mlflow.experiments.append(types.SimpleNamespace(experiment_id="7"))
    libraries.MLflowTracker("known").start()
    assert mlflow.taken()[-1][2]["experiment_id"] == "7"
    libraries.MLflowTracker().start()
    (start,) = mlflow.taken()
    assert start[2]["experiment_id"] is None


def test_the_environment_of_mlflow_wins(mlflow, monkeypatch):
    for name, value in (("EXPERIMENT_NAME", "other"), ("RUN_ID", "r"), ("TAGS", '{"a": "b"}'), ("NESTED_RUN", "true")):
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    libraries.MLflowTracker("name", tags={"t": 1}).start()
    search, create, start = mlflow.taken()
    assert "other" in search[1] and create[2]["name"] == "other"
    assert (start[2]["run_id"], start[2]["tags"], start[2]["nested"]) == ("r", {"a": "b"}, True)


@pytest.mark.parametrize("tags", ["{", "[1]"])
def test_tags_must_be_a_json_object(mlflow, tags):
    with pytest.raises(ValueError, match="JSON"):
        libraries.MLflowTracker("name", tags=tags)


def test_mlflow_artifacts(mlflow):
    tracker = libraries.MLflowTracker("name")
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
