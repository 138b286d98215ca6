"""Tracking with Weights & Biases, SwanLab and Trackio."""

import pytest

from accelerate.trackers.runs import SwanLabTracker, TrackioTracker, WandBTracker


@pytest.mark.parametrize("tracker_class", [SwanLabTracker, TrackioTracker, WandBTracker])
def test_a_run(library, tracker_class):
    name = tracker_class.name
    library.install(name)
    tracker = tracker_class("project", name="run")
    assert library.taken() == [] and tracker.tracker is None
    tracker.start()
    begun = [(f"{name}.init", (), {"project": "project", "name": "run"})]
    if name == "swanlab":
        begun.append(("swanlab.config['FRAMEWORK'] =", ("Accelerate",), {}))
    assert library.taken() == begun
    assert tracker.tracker == f"<{name}.init()>"
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5, "note": "x"}, step=3, commit=False)
    tracker.log({"loss": 0.5})
    tracker.finish()
    assert library.taken() == [
        (f"{name}.config.update", ({"lr": 0.1},), {"allow_val_change": True}),
        (f"{name}.init().log", ({"loss": 0.5, "note": "x"},), {"step": 3, "commit": False}),
        (f"{name}.init().log", ({"loss": 0.5},), {"step": None}),
        (f"{name}.init().finish", (), {}),
    ]
    assert tracker_class.main_process_only is False, "every rank may log"
    assert tracker_class.requires_logging_directory is False


@pytest.mark.parametrize("tracker_class", [SwanLabTracker, WandBTracker])
def test_images(library, tracker_class):
    library.install(tracker_class.name)
    tracker = tracker_class("project")
    tracker.start()
    library.taken()
    tracker.log_images({"pictures": ["one", "two"]}, step=2, commit=False)
    *images, logged = library.taken()
    assert [call[1:] for call in images] == [(("one",), {}), (("two",), {})]
    assert logged[1:] == (({"pictures": [f"<{tracker_class.name}.Image()>"] * 2},), {"step": 2, "commit": False})


def test_tables(library):
    library.install("wandb")
    tracker = WandBTracker("project")
    tracker.start()
    library.taken()
    tracker.log_table("table", columns=["a"], data=[[1]], step=4)
    logged = library.taken()
    assert logged[0] == ("wandb.Table", (), {"columns": ["a"], "data": [[1]], "dataframe": None})
    assert logged[1] == ("wandb.init().log", ({"table": "<wandb.Table()>"},), {"step": 4})
