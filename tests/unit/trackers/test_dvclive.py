"""Tracking with DVCLive."""

from accelerate.trackers.dvclive import DVCLiveTracker


def fake(library):
    library.install("dvclive")

    class Metric:
        @staticmethod
        def could_log(value):
            return isinstance(value, float)

    library.install("dvclive.plots", Metric=Metric)


def test_a_run(library, caplog):
    fake(library)
    tracker = DVCLiveTracker("run", dir="folder")
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5, "note": "x"}, step=3)
    tracker.log({"loss": 0.25})
    tracker.finish()
    assert library.taken() == [
        ("dvclive.Live", (), {"dir": "folder"}),
        ("dvclive.Live().log_params", ({"lr": 0.1},), {}),
        ("dvclive.Live().step =", (3,), {}),
        ("dvclive.Live().log_metric", ("loss", 0.5), {}),
        ("dvclive.Live().next_step", (), {}),
        ("dvclive.Live().log_metric", ("loss", 0.25), {}),
        ("dvclive.Live().next_step", (), {}),
        ("dvclive.Live().end", (), {}),
    ]
    assert "'note'" in caplog.text


def test_an_object_of_ones_own(library):
    fake(library)
    live = object()
    tracker = DVCLiveTracker(live=live)
    tracker.start()
    assert tracker.tracker is live and library.taken() == []
