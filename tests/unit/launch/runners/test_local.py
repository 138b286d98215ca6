"""Processes of one machine: what replaces the launcher, and what torch's elastic launcher gets; tests/distributed starts them."""

import contextlib
import gc
import signal

import pytest

from accelerate.launch import elastic, runners
from accelerate.launch.runners import local


@pytest.fixture
def started(monkeypatch):
    """What would have been started."""
    calls = []
    monkeypatch.setattr(elastic, "make_config", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(elastic, "start", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


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
