"""Programs that the launcher starts or becomes, and imports in one go."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys

import pytest

from accelerate.launch import elastic, runners
from accelerate.launch.runners import local
from cases import cases

pytestmark = pytest.mark.cold

posix = pytest.mark.skipif(os.name != "posix", reason="signals and replaced processes are those of POSIX")


ENDS_BY_ITSELF = "import os, signal; os.kill(os.getppid(), int(os.environ['NUMBER'])); signal.pause()"
ENDS_WITH_0 = f"import signal, sys\nsignal.signal(int(__import__('os').environ['NUMBER']), lambda *_: sys.exit(0))\n{ENDS_BY_ITSELF}"


@posix
@cases(
    "text, name, stopped_is_failed, fails",
    *((ENDS_BY_ITSELF, name, False, True) for name in ("SIGTERM", "SIGUSR1")),
    (ENDS_WITH_0, "SIGTERM", False, False),
    (ENDS_WITH_0, "SIGTERM", True, True),  # MPICH's mpirun does that now and then
    (ENDS_WITH_0, "SIGUSR1", True, False),  # that stops nothing, so 0 is believed after it
)
def test_signals_reach_the_child(text, name, stopped_is_failed, fails):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` may have started the tests
    try:
        with pytest.raises(subprocess.CalledProcessError) if fails else contextlib.nullcontext() as caught:
            environment = {**os.environ, "NUMBER": str(int(number))}
            runners.start([sys.executable, "-c", text], environment, stopped_is_failed=stopped_is_failed)
        assert not fails or caught.value.returncode == -number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end a process with its parent")
def test_the_child_ends_with_a_launcher_that_is_killed_and_has_signals_as_ever(capfd):
    text = "import os, sys; from accelerate.launch import runners; runners.start(sys.argv[1:], os.environ)"
    child = "import os, time; os.kill(os.getppid(), 9); time.sleep(300)"
    command = [sys.executable, "-c", text, sys.executable, "-c", child]
    # The output is at its end when the child is.
    assert subprocess.run(command, stdout=subprocess.PIPE, timeout=60).returncode == -signal.SIGKILL
    # With a path: Python 3.13 starts such programs by posix_spawn, where glibc ignores its own two signals.
    ignored = [shutil.which("grep"), "SigIgn", "/proc/self/status"]
    runners.start(ignored, os.environ)
    assert capfd.readouterr().out == subprocess.check_output(ignored, text=True)
    with pytest.raises(subprocess.CalledProcessError):
        runners.start(["./none"], os.environ)
    assert capfd.readouterr().err == "accelerate launch: ./none cannot be started: No such file or directory.\n"


@posix
def test_an_interrupt_that_no_terminal_sends_reaches_the_child(tmp_path):
    """It comes to the launcher alone then, which must not wait for a child that knows nothing."""
    child = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    os.kill(os.getppid(), signal.SIGINT); time.sleep(300)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(os.environ['OUT']).write_text('interrupted')"
    )
    text = (
        "import os, signal, sys; from accelerate.launch import runners\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    runners.start([sys.executable, '-c', sys.argv[1]], os.environ)\n"
        "except KeyboardInterrupt:\n    sys.exit(5)"
    )
    variables = {**os.environ, "OUT": str(tmp_path / "out")}
    command = [sys.executable, "-c", text, child]
    # a separate session has no terminal.
    done = subprocess.run(command, env=variables, start_new_session=True, check=False, timeout=60)
    assert done.returncode == 5 and (tmp_path / "out").read_text() == "interrupted"


def test_notes_are_printed_unless_quiet(plan, monkeypatch, capsys):
    monkeypatch.setattr(elastic, "start", lambda *args, **kwargs: None)
    runners.run(plan("--cpu --num_processes 2"))
    assert capsys.readouterr().err.startswith("accelerate launch: OMP_NUM_THREADS=4 ")
    runners.run(plan("--quiet --cpu --num_processes 2"))
    assert capsys.readouterr().err == ""


def test_an_interrupt_is_not_lost_in_an_import_and_collection_is_as_before():
    """Torch's import, and NumPy's, catch whatever comes while they try what is optional."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), local.in_one_go():
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.disable()
        with local.in_one_go():
            signal.raise_signal(signal.SIGINT)
        assert not gc.isenabled()
        gc.enable()
        with local.in_one_go():
            assert not gc.isenabled()
        assert gc.isenabled()
    finally:
        signal.signal(signal.SIGINT, before)
