"""Tracking with SwanLab."""

from accelerate.trackers.swanlab import SwanLabTracker


def test_a_run(library):
    library.install("swanlab")
    tracker = SwanLabTracker("project", mode="local")
    tracker.start()
    assert library.taken() == [
        ("swanlab.init", (), {"project": "project", "mode": "local"}),
        ("swanlab.config['FRAMEWORK'] =", ("Accelerate",), {}),
    ]
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3)
    tracker.log_images({"pictures": ["one"]}, step=2, print_to_console=True)
    tracker.finish()
    assert library.taken() == [
        ("swanlab.config.update", ({"lr": 0.1},), {"allow_val_change": True}),
        ("swanlab.init().log", ({"loss": 0.5},), {"step": 3}),
        ("swanlab.Image", ("one",), {}),
        ("swanlab.init().log", ({"pictures": ["<swanlab.Image()>"]},), {"step": 2, "print_to_console": True}),
        ("swanlab.init().finish", (), {}),
    ]
