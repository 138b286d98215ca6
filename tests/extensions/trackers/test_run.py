"""The trackers of an Accelerator."""

import pickle
import subprocess
import sys

import pytest
import torch

from accelerate import Accelerator
from accelerate.extensions.trackers import registry, run
from accelerate.extensions.trackers.base import GeneralTracker


def test_a_tracker_that_has_started_is_finished_where_the_next_one_fails():
    class Failing(Recording):
        def start(self):
            raise OSError("no network")

    first = Recording()
    accelerator = Accelerator(cpu=True, log_with=[first, Failing()])
    with pytest.raises(OSError, match="no network"):
        accelerator.init_trackers("run")
    assert accelerator.trackers == [first]
    accelerator.end_training()
    assert first.events[-1] == "finish"


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
    monkeypatch.setattr(run, "LOGGER_TYPE_TO_CLASS", {**registry.LOGGER_TYPE_TO_CLASS, **known})


@pytest.fixture
def make():
    def make(*log_with):
        accelerator = Accelerator(cpu=True, project_dir="logs")
        accelerator.log_with = list(log_with)
        return accelerator

    return make


def test_a_run(make):
    accelerator = make("recording", "local")
    config, values = {"lr": 0.1}, {"loss": 1}
    accelerator.init_trackers("project", config, {"recording": {"a": 1}})
    accelerator.log(values, step=3, log_kwargs={"local": {"b": 2}, "recording": None})
    first, second = (tracker.events for tracker in accelerator.trackers)
    accelerator.end_training()
    assert first == [("made", "project", {"a": 1}), "start", ("config", {"lr": 0.1}), ({"loss": 1}, 3, {}), "finish"]
    assert second[0] == ("made", "project", {"logging_dir": "logs"}) and second[3] == ({"loss": 1}, 3, {"b": 2})
    assert (config, values) == ({"lr": 0.1}, {"loss": 1}), "no tracker can change what the caller passed"


def test_starting_again_leaves_one_run_of_each(make):
    own = Recording("mine")
    accelerator = make("local", own)
    accelerator.init_trackers("first", {"a": 1})
    assert own.events == [("made", "mine", {}), "start", ("config", {"a": 1})]
    old = accelerator.trackers[0]
    accelerator.init_trackers("second")
    assert [tracker.name for tracker in accelerator.trackers] == ["local", "recording"]
    assert old.events[-1] == "finish" and accelerator.trackers[0].events[0][1] == "second"
    assert own.events.count("start") == 1 and "finish" not in own.events


def test_a_finished_run_can_be_asked_and_is_finished_once(make):
    own = Recording()
    accelerator = make(own)
    assert type(accelerator.get_tracker("recording")) is GeneralTracker
    assert accelerator.get_tracker("recording").log({}) is None
    accelerator.init_trackers("project")
    for _ in range(2):
        accelerator.end_training()
    assert accelerator.trackers == [own] and accelerator.get_tracker("recording") is own
    assert accelerator.get_tracker("recording", unwrap=True) is own.events
    with pytest.raises(ValueError, match="other is not.*recording"):
        accelerator.get_tracker("other")
    assert own.events.count("finish") == 1
    accelerator.init_trackers("again")
    accelerator.end_training()
    assert own.events[1:] == ["start", "finish", "start", "finish"]


def test_a_failing_tracker_does_not_stop_the_run_or_the_others(make, caplog, process_group):
    accelerator = make("failing", "recording")
    accelerator.init_trackers("project")
    events = accelerator.trackers[1].events
    accelerator.log({"a": 1})
    accelerator.end_training()
    assert events[-2:] == [({"a": 1}, None, {}), "finish"]
    assert caplog.text.count("'failing' failed") == 2 and "ConnectionError: gone" in caplog.text
    assert not torch.distributed.is_initialized(), "the process group is left in any case"


def test_whether_every_rank_is_needed(make):
    class Everywhere(Recording):
        main_process_only = False

    assert not run.needs_every_rank(make())
    assert not run.needs_every_rank(make("recording"))
    assert run.needs_every_rank(make("recording", Everywhere()))


def test_a_tracker_of_the_main_process_does_nothing_elsewhere_beside_one_of_all_ranks(monkeypatch):
    class Everywhere(Recording):
        name, main_process_only = "everywhere", False

    main, every = Recording(), Everywhere()
    accelerator = Accelerator(cpu=True, log_with=[main, every])
    monkeypatch.setattr(type(accelerator), "is_main_process", False)
    accelerator.init_trackers("project", config={"rate": 1})
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert len(main.events) == 1 and every.events[1] == "start" and every.events[-1] == "finish"
    assert accelerator.get_tracker("recording") is main


def test_trackers_that_a_program_assigns_are_finished():
    accelerator, own = Accelerator(cpu=True), Recording()
    accelerator.trackers = [own]
    accelerator.end_training()
    assert own.events[1:] == ["finish"]


def test_a_copy_in_another_process_logs_and_finishes():
    accelerator = Accelerator(cpu=True, log_with=Recording())
    accelerator.init_trackers("project")
    copy = pickle.loads(pickle.dumps(accelerator))
    copy.log({"a": 1})
    copy.end_training()
    copy.prepare(torch.nn.Linear(1, 1))  # asks for the extensions of the copy
    copy.end_training()
    assert [tracker.events[1:] for tracker in copy.trackers] == [["start", ({"a": 1}, None, {}), "finish"]]
    assert [type(tracker) for tracker in copy.log_with] == [Recording]
    assert accelerator.trackers[0].events[1:] == ["start"]


def test_methods_are_replaced_and_overridden_as_others(monkeypatch):
    class Doubling(Accelerator):
        def log(self, values, **kwargs):
            super().log({name: 2 * value for name, value in values.items()}, **kwargs)

    accelerator = Doubling(cpu=True, log_with=Recording())
    accelerator.init_trackers("project")
    accelerator.log({"a": 1}, step=3)
    assert accelerator.trackers[0].events[-1] == ({"a": 2}, 3, {})
    logged = []
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "log", lambda self, values, **kwargs: logged.append(values))
        accelerator.log({"a": 3})
    accelerator.log({"a": 4})
    assert logged == [{"a": 6}] and accelerator.trackers[0].events[-1][0] == {"a": 8}
    assert pickle.loads(pickle.dumps(Accelerator(cpu=True).get_tracker)).__name__ == "get_tracker"


def test_nothing_of_trackers_is_imported_without_them():
    program = (
        "import sys; from accelerate import Accelerator; Accelerator(cpu=True).end_training(); "
        "print([name for name in sys.modules if name.startswith('accelerate.extensions.trackers.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['accelerate.extensions.trackers.extension']"], done.stderr
