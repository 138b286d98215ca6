"""Tracking with ClearML."""

import pytest

from accelerate.trackers.clearml import ClearMLTracker


def start(library, running):
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
    tracker = ClearMLTracker("run", project_name="p")
    tracker.start()
    return tracker


def test_a_task_of_ones_own_is_closed(library):
    tracker = start(library, running=False)
    assert library.taken() == [("init", {"project_name": "p", "task_name": "run"})]
    tracker.finish()
    assert library.taken() == [("source.task.close", (), {})]


def test_a_running_task_is_joined_and_left(library):
    tracker = start(library, running=True)
    tracker.finish()
    assert library.taken() == [] and tracker.tracker == "<source.task>"


def test_configuration_is_given_as_a_copy(library):
    tracker = start(library, running=True)
    config = {"lr": 0.1}
    tracker.store_init_configuration(config)
    ((_, (given,), _),) = library.taken()
    assert given == config and given is not config


def test_series_by_prefix(library, caplog):
    tracker = start(library, running=True)
    tracker.log({"eval_loss": 1.0, "loss": 2, "note": "x"}, step=3)
    points = [kwargs for name, _, kwargs in library.taken() if name.endswith("report_scalar")]
    assert points == [
        {"title": "loss", "series": "eval", "value": 1.0, "iteration": 3},
        {"title": "loss", "series": "train", "value": 2, "iteration": 3},
    ]
    assert "'note'" in caplog.text
    tracker.log({"loss": 2})
    assert library.taken()[-1][2] == {"name": "loss", "value": 2}


def test_images_and_tables(library):
    tracker = start(library, running=True)
    tracker.log_images({"test_x": "image"}, step=2)
    assert library.taken()[-1][2] == {"title": "x", "series": "test", "iteration": 2, "image": "image"}
    tracker.log_table("t", columns=["a"], data=[[1]], step=4)
    assert library.taken()[-1][2]["table_plot"] == [["a"], [1]]
    tracker.log_table("t", dataframe="frame")
    assert library.taken()[-1][2]["table_plot"] == "frame"
    with pytest.raises(ValueError, match="data"):
        tracker.log_table("t")
