"""Tracking with Aim."""

import types

from accelerate.trackers.aim import AimTracker


def test_a_run(library, tmp_path):
    library.install("aim")
    tracker = AimTracker("run", logging_dir=tmp_path, experiment="e")
    tracker.start()
    assert library.taken() == [
        ("aim.Run", (), {"repo": tmp_path, "experiment": "e"}),
        ("aim.Run().name =", ("run",), {}),
    ]
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3, context={"subset": "train"})
    tracker.finish()
    assert library.taken() == [
        ("aim.Run()['hparams'] =", ({"lr": 0.1},), {}),
        ("aim.Run().track", (0.5,), {"name": "loss", "step": 3, "context": {"subset": "train"}}),
        ("aim.Run().close", (), {}),
    ]


def test_images(library):
    library.install("aim")
    tracker = AimTracker("run")
    tracker.start()
    library.taken()
    tracker.log_images({"a": "image", "b": ("image", "caption")}, step=2)
    tracker.log_images({"c": "image"}, kwargs={"aim_image": {"format": "png"}, "track": {"context": {}}})
    calls = library.taken()
    assert calls[0] == ("aim.Image", ("image",), {"caption": ""})
    assert calls[1] == ("aim.Run().track", ("<aim.Image()>",), {"name": "a", "step": 2})
    assert calls[2] == ("aim.Image", ("image",), {"caption": "caption"})
    assert calls[4] == ("aim.Image", ("image",), {"caption": "", "format": "png"})
    assert calls[5][2] == {"name": "c", "step": None, "context": {}}


def test_what_the_library_refuses_is_left_out_alone(caplog):
    def track(value, **kwargs):
        float(value)  # as strict as the library
        seen.append(value)

    seen, tracker = [], AimTracker("run")
    tracker.writer = types.SimpleNamespace(track=track)
    tracker.log({"bad": [1], "text": "x", "good": 1})
    assert seen == [1] and "'bad' is a list" in caplog.text and "'text' is a str" in caplog.text
