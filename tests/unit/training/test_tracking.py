"""The trackers of an Accelerator."""

import types

import pytest

from accelerate.trackers import registry
from accelerate.trackers.base import GeneralTracker
from accelerate.training import tracking


class Recording(GeneralTracker):
    name = "recording"
    requires_logging_directory = False

    def __init__(self, run_name="", **kwargs):
        super().__init__()
        self.events = [("made", run_name, kwargs)]

    @property
    def tracker(self):
        return self.events

    def start(self):
        self.events.append("start")

    def store_init_configuration(self, values):
        self.events.append(("config", dict(values)))
        values.clear()

    def log(self, values, step=None, **kwargs):
        self.events.append((dict(values), step, kwargs))
        values.clear()

    def finish(self):
        self.events.append("finish")


class Local(Recording):
    name = "local"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir, **kwargs):
        super().__init__(run_name, logging_dir=logging_dir, **kwargs)


class Failing(Recording):
    name = "failing"

    def log(self, values, step=None, **kwargs):
        raise ConnectionError("gone")

    def finish(self):
        raise ConnectionError("gone")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    known = {tracker.name: tracker for tracker in (Recording, Local, Failing)}
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {**registry.LOGGER_TYPE_TO_CLASS, **known})


@pytest.fixture
def make():
    def make(*log_with):
        left = []
        state = types.SimpleNamespace(destroy_process_group=lambda: left.append(True))
        own = {"trackers": [], "_finished_trackers": [], "logging_dir": "logs", "state": state, "left": left}
        return types.SimpleNamespace(log_with=list(log_with), **own)

    return make


def test_a_run(make):
    accelerator = make("recording", "local")
    config, values = {"lr": 0.1}, {"loss": 1}
    tracking.init_trackers(accelerator, "project", config, {"recording": {"a": 1}})
    tracking.log(accelerator, values, step=3, log_kwargs={"local": {"b": 2}})
    first, second = (tracker.events for tracker in accelerator.trackers)
    tracking.end_training(accelerator)
    assert first == [
        ("made", "project", {"a": 1}),
        "start",
        ("config", {"lr": 0.1}),
        ({"loss": 1}, 3, {}),
        "finish",
    ]
    assert second[0] == ("made", "project", {"logging_dir": "logs"}) and second[3] == ({"loss": 1}, 3, {"b": 2})
    assert (config, values) == ({"lr": 0.1}, {"loss": 1}), "no tracker can change what the caller passed"
    assert accelerator.left == [True]


def test_nothing_given(make):
    accelerator = make("recording")
    tracking.init_trackers(accelerator, "project", None, None)
    tracking.log(accelerator, {"a": 1}, None, None)
    tracking.log(accelerator, {"a": 1}, log_kwargs={"recording": None})
    assert accelerator.trackers[0].events[1:] == ["start", ({"a": 1}, None, {}), ({"a": 1}, None, {})]


def test_objects_are_used_as_they_are(make):
    own = Recording("mine")
    accelerator = make(own)
    tracking.init_trackers(accelerator, "project", {"a": 1})
    assert accelerator.trackers == [own]
    assert own.events == [("made", "mine", {}), "start", ("config", {"a": 1})]


def test_starting_again_leaves_one_run_of_each(make):
    own = Recording()
    accelerator = make("local", own)
    tracking.init_trackers(accelerator, "first")
    old = accelerator.trackers[0]
    tracking.init_trackers(accelerator, "second")
    assert [tracker.name for tracker in accelerator.trackers] == ["local", "recording"]
    assert old.events[-1] == "finish" and accelerator.trackers[0].events[0][1] == "second"
    assert own.events.count("start") == 1 and "finish" not in own.events


def test_a_finished_run_can_be_asked_and_is_finished_once(make):
    own = Recording()
    accelerator = make(own)
    tracking.init_trackers(accelerator, "project")
    for _ in range(2):
        tracking.end_training(accelerator)
    assert accelerator.trackers == [own] and tracking.get_tracker(accelerator, "recording") is own
    assert own.events.count("finish") == 1
    tracking.init_trackers(accelerator, "again")
    tracking.end_training(accelerator)
    assert own.events[1:] == ["start", "finish", "start", "finish"]


def test_get_tracker(make):
    accelerator = make("recording")
    blank = tracking.get_tracker(accelerator, "recording")
    assert type(blank) is GeneralTracker and blank.log({}) is None
    tracking.init_trackers(accelerator, "project")
    tracker = tracking.get_tracker(accelerator, "recording")
    assert tracker is accelerator.trackers[0]
    assert tracking.get_tracker(accelerator, "recording", unwrap=True) is tracker.events
    with pytest.raises(ValueError, match="other is not.*recording"):
        tracking.get_tracker(accelerator, "other")


def test_a_failing_tracker_does_not_stop_the_run_or_the_others(make, caplog):
    accelerator = make("failing", "recording")
    tracking.init_trackers(accelerator, "project")
    events = accelerator.trackers[1].events
    tracking.log(accelerator, {"a": 1})
    tracking.end_training(accelerator)
    assert events[-2:] == [({"a": 1}, None, {}), "finish"]
    assert caplog.text.count("'failing' failed") == 2 and "ConnectionError: gone" in caplog.text
    assert accelerator.left == [True]


def test_a_tracker_that_cannot_start_is_an_error(make):
    class Broken(Recording):
        def start(self):
            raise ConnectionError("no network")

    accelerator = make(Broken())
    with pytest.raises(ConnectionError):
        tracking.init_trackers(accelerator, "project")
    assert accelerator.trackers == []


def test_whether_every_rank_is_needed(make):
    class Everywhere(Recording):
        main_process_only = False

    assert not tracking.needs_every_rank(make())
    assert not tracking.needs_every_rank(make("recording", registry.LoggerType.MLFLOW))
    assert tracking.needs_every_rank(make("recording", Everywhere()))
    assert tracking.needs_every_rank(make(registry.LoggerType.WANDB))
