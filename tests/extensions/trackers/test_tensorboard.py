"""Tracking with TensorBoard, for real."""

import os

import numpy as np
import pytest
import torch
import yaml

from accelerate.extensions.trackers.libraries import TensorBoardTracker

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder):
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.fixture
def tracker(tmp_path):
    tracker = TensorBoardTracker("run", tmp_path, flush_secs=1)
    tracker.start()
    yield tracker
    tracker.finish()


def test_text_and_dicts(tracker, tmp_path):
    tracker.log({"note": "hello", "both": {"a": 1.0, "b": 2.0}}, step=1)
    assert read(tmp_path / "run").Tags()["tensors"] == ["note/text_summary"]
    assert read(tmp_path / "run" / "both_a").Scalars("both")[0].value == 1.0
    assert read(tmp_path / "run" / "both_b").Scalars("both")[0].value == 2.0


def test_what_is_no_number_is_left_out_alone(tracker, tmp_path, caplog):
    values = {"array": np.ones(3), "tensor": torch.ones(2), "word": np.array("x"), "one": np.ones(1), "last": 2}
    for step in (1, 2):
        tracker.log({**values, "both": {"a": 1.0, "b": [1]}}, step=step)
    assert read(tmp_path / "run").Tags()["scalars"] == ["one", "last"]
    assert read(tmp_path / "run" / "both_a").Scalars("both")[0].value == 1.0
    assert [caplog.text.count(f"'{name}' is a") for name in ("array", "tensor", "word", "b")] == [1, 1, 1, 1]


def test_images(tracker, tmp_path):
    tracker.log_images({"picture": torch.rand(2, 3, 4, 4)}, step=2)
    tracker.tracker.flush()
    assert read(tmp_path / "run").Images("picture")[0].step == 2


def test_configuration_is_stored_twice(tracker, tmp_path):
    config = {"lr": 0.1, "name": "x", "layers": [1, 2], "nothing": None, "device": torch.device("cpu")}
    given = dict(config)
    tracker.store_init_configuration(config)
    assert config == given
    files = [os.path.join(top, name) for top, _, names in os.walk(tmp_path / "run") for name in names]
    (stored,) = [name for name in files if name.endswith("hparams.yml")]
    with open(stored) as file:
        assert yaml.safe_load(file) == {**config, "device": "cpu"}
    assert len([name for name in files if "tfevents" in name]) == 2
