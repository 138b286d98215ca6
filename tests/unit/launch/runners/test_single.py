"""One process, in place of the launcher or as its child; real launches are in tests/distributed."""

import os
import signal
import subprocess
import sys

import pytest

from accelerate.launch import runners
from accelerate.launch.runners import single


def test_child_gets_its_environment(tmp_path):
    program = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['MARK'])"
    single.run_child([sys.executable, "-c", program, str(tmp_path / "out")], {**os.environ, "MARK": "x"})
    assert (tmp_path / "out").read_text() == "x"


def test_child_failure_is_raised():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        single.run_child([sys.executable, "-c", "raise SystemExit(4)"], os.environ)
    assert caught.value.returncode == 4


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_the_child(number, monkeypatch):
    before = signal.signal(number, signal.SIG_DFL)  # a runner of tests may be started by `nohup`
    program = "import os, signal; os.kill(os.getppid(), int(os.environ['NUMBER'])); signal.pause()"
    try:
        with pytest.raises(subprocess.CalledProcessError) as caught:
            single.run_child([sys.executable, "-c", program], {**os.environ, "NUMBER": str(int(number))})
        assert caught.value.returncode == -number and signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_program_whose_status_means_nothing_once_it_was_stopped(number):
    """MPICH's mpirun ends with 0 now and then; SIGUSR1 stops nothing, so 0 is believed after it."""
    program = (
        "import os, signal, sys\n"
        "number = int(os.environ['NUMBER'])\n"
        "signal.signal(number, lambda *_: sys.exit(0)); os.kill(os.getppid(), number); signal.pause()"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "NUMBER": str(int(number))}
    single.run_child(command, environment)
    if number == signal.SIGUSR1:
        single.run_child(command, environment, stopped_is_failed=True)
        return
    with pytest.raises(subprocess.CalledProcessError) as caught:
        single.run_child(command, environment, stopped_is_failed=True)
    assert caught.value.returncode == -number


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_what_the_launcher_ignores_the_child_ignores():
    program = (
        "import os, signal\n"
        "os.kill(os.getppid(), signal.SIGHUP)\n"
        "raise SystemExit(0 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 9)"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        single.run_child([sys.executable, "-c", program], os.environ)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_an_interrupt_that_the_terminal_did_not_send_reaches_the_child(tmp_path, monkeypatch):
    """It comes to the launcher alone then, which must not wait for a child that knows nothing."""
    program = (
        "import os, pathlib, signal, time\n"
        "try:\n    os.kill(os.getppid(), signal.SIGINT); time.sleep(300)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(os.environ['OUT']).write_text('interrupted')"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(single, "_in_foreground", lambda: False)
    try:
        with pytest.raises(KeyboardInterrupt):
            single.run_child([sys.executable, "-c", program], {**os.environ, "OUT": str(tmp_path / "out")})
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "out").read_text() == "interrupted"


def test_without_a_terminal_nothing_is_in_its_foreground(monkeypatch):
    def refuse(*args):
        raise OSError

    monkeypatch.setattr(os, "open", refuse)
    assert not single._in_foreground()
    monkeypatch.delattr(os, "tcgetpgrp", raising=False)
    assert single._in_foreground()  # a console of Windows tells all its processes


def test_one_process_replaces_the_launcher_only_where_it_may(plan, monkeypatch):
    calls = []
    monkeypatch.setattr(single, "become", lambda command, environment: calls.append("become"))
    monkeypatch.setattr(single, "run_child", lambda command, environment: calls.append("child"))
    runners.run(plan("--cpu"), replace=True)
    runners.run(plan("--cpu"))
    monkeypatch.setattr(sys, "platform", "win32")  # where a replaced process looks to its shell as if it had ended
    runners.run(plan("--cpu"), replace=True)
    assert calls == ["become", "child", "child"]
    assert single.processes(plan("--cpu"), {})[0].command[-1] == "train.py"


@pytest.mark.skipif(os.name != "posix", reason="the process is replaced")
def test_a_daemon_without_streams_is_replaced_too():
    program = "import sys; from accelerate.launch.runners import single; sys.stdout = sys.stderr = None; single.become(['true'], {})"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
