"""Tracking with Trackio."""

from accelerate.trackers.trackio import TrackioTracker


def test_a_run(library):
    library.install("trackio")
    tracker = TrackioTracker("project", name="run")
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3)
    tracker.finish()
    assert library.taken() == [
        ("trackio.init", (), {"project": "project", "name": "run"}),
        ("trackio.config.update", ({"lr": 0.1},), {"allow_val_change": True}),
        ("trackio.init().log", ({"loss": 0.5},), {"step": 3}),
        ("trackio.init().finish", (), {}),
    ]
