"""Tracking with Comet."""

import pytest
import torch

from accelerate.trackers.comet import CometMLTracker


@pytest.mark.parametrize(("version", "begin"), [("3.41.0", "start"), ("3.40.9", "Experiment")])
def test_the_experiment_is_started_as_the_version_wants(library, version, begin):
    library.install("comet_ml", __version__=version)
    tracker = CometMLTracker("project", workspace="w")
    tracker.start()
    assert library.taken() == [(f"comet_ml.{begin}", (), {"project_name": "project", "workspace": "w"})]


def test_values_by_their_kind(library, caplog):
    library.install("comet_ml", __version__="3.50")
    tracker = CometMLTracker("project")
    tracker.start()
    library.taken()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": torch.tensor(0.5), "note": "x", "both": {"a": 1}, "many": torch.ones(2)}, step=3)
    tracker.finish()
    name = "comet_ml.start()"
    assert library.taken() == [
        (f"{name}.log_parameters", ({"lr": 0.1},), {}),
        (f"{name}.set_step", (3,), {}),
        (f"{name}.log_metric", ("loss", 0.5), {"step": 3}),
        (f"{name}.log_other", ("note", "x"), {}),
        (f"{name}.log_metrics", ({"a": 1},), {"step": 3}),
        (f"{name}.end", (), {}),
    ]
    assert "'many' is a Tensor" in caplog.text
