"""Processes of one machine: what replaces the launcher, and what torch's elastic launcher gets; tests/distributed starts them."""

import contextlib
import gc
import signal

import pytest

from accelerate.launch import elastic, runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.runners import local
from accelerate.utils.other import get_free_port


@pytest.fixture
def started(monkeypatch):
    """What would have been started."""
    calls = []
    monkeypatch.setattr(elastic, "make_config", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(elastic, "start", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def test_one_process_replaces_the_launcher_only_where_it_may(plan, monkeypatch):
    calls = []
    monkeypatch.setattr(runners, "start", lambda command, environment, replace: calls.append((command[-1], replace)))
    runners.run(plan("--cpu"), replace=True)
    runners.run(plan("--cpu"))
    assert calls == [("train.py", True), ("train.py", False)]
    assert runners.processes(plan("--cpu"))[0].command[-1] == "train.py"


def test_options_reach_the_launcher(plan, started):
    runners.run(
        plan("--cpu --num_processes 2 --max_restarts 2 --monitor_interval 0.5 --role x --tee 1:2 --log_dir out")
    )
    (args, options), _ = started
    assert args[0] == 2 and args[2] == "out"
    assert options == {"tee": {1: 2}, "role": "x", "max_restarts": 2, "monitor_interval": 0.5}


def test_nothing_starts_with_options_that_cannot_be_used(plan, started):
    with pytest.raises(LaunchError, match="--tee"):
        runners.run(plan("--cpu --num_processes 2 --tee x"))
    assert started == []


def test_what_would_be_started(plan):
    first, second = local.processes(plan("--cpu --num_processes 2"), {"A": "1"})
    assert (first.label, second.label) == ("rank 0", "rank 1")
    wanted = {"A": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    wanted["MASTER_ADDR"] = "127.0.0.1"
    assert wanted.items() <= second.environment.items() and "MASTER_PORT" not in second.environment
    (first, _) = local.processes(plan(f"--cpu --num_processes 2 --main_process_port {get_free_port()}"), {})
    assert int(first.environment["MASTER_PORT"]) > 0


def test_notes_are_printed_unless_quiet(plan, started, capsys):
    runners.run(plan("--cpu --num_processes 2"))
    assert capsys.readouterr().err.startswith("accelerate launch: OMP_NUM_THREADS=4 ")
    runners.run(plan("--quiet --cpu --num_processes 2"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with local.in_one_go():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_an_interrupt_is_not_lost_in_an_import():
    """Torch's import, and NumPy's, catch whatever comes while they try what is optional."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), local.in_one_go():
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with local.in_one_go():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
