"""The process that ends what a killed launcher had started; with real processes."""

import os
import signal
import subprocess
import sys
import zipfile

import pytest

from accelerate.launch import guard

pytestmark = [
    pytest.mark.cold,
    pytest.mark.skipif(os.name != "posix", reason="process groups are those of POSIX"),
]
SLEEP = "import time; print('up', flush=True); time.sleep(300)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.fixture
def group():
    """Start programs, each in a group of its own, and wait until they run."""
    started = []

    def start(program):
        process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_groups_are_asked_first_and_killed_then(group):
    asked, deaf = group(SLEEP), group(DEAF)
    guard.end_groups([asked.pid, deaf.pid], grace=0.1)
    assert asked.wait(30) == -signal.SIGTERM and deaf.wait(30) == -signal.SIGKILL
    guard.end_groups([asked.pid, deaf.pid], grace=30)  # nobody is left to wait for


def test_a_guard_ends_those_named_last_unless_it_is_dismissed(group):
    before, now, dismissed, watching = group(SLEEP), group(SLEEP), guard.Guard(0.1), guard.Guard(0.1)
    dismissed.watch([before.pid])
    dismissed.close()
    dismissed.close()  # twice does no harm
    watching.watch([before.pid])
    watching.watch([now.pid])
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
        watching._process.send_signal(getattr(signal, name))  # a scheduler signals every process of a job
    watching._process.stdin.close()  # as when the launcher is killed
    assert now.wait(30) == -signal.SIGTERM
    assert watching._process.wait(30) == 0 and before.poll() is None


def test_a_guard_of_a_zipped_package_watches_as_well(group, tmp_path):
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as package:
        package.write(guard.__file__, "zipped_guard.py")
    orphan = group(SLEEP)
    program = "import os, sys, zipped_guard; zipped_guard.Guard(0.1).watch([int(sys.argv[1])]); os._exit(0)"
    search = {**os.environ, "PYTHONPATH": str(tmp_path / "package.zip")}
    subprocess.run([sys.executable, "-c", program, str(orphan.pid)], check=True, env=search, timeout=60)
    assert orphan.wait(30) == -signal.SIGTERM


def test_it_holds_no_output_of_the_launcher_open():
    program = (
        "from accelerate.launch.guard import Guard; import os, signal; g = Guard(); "
        "print(g._process.pid, flush=True); os.kill(g._process.pid, signal.SIGSTOP); os._exit(0)"
    )
    # A guard that is stopped still exists; a reader of the launcher's output must see its end all the same.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 0
