"""The process that ends what a killed launcher had started; with real processes."""

import os
import signal
import subprocess
import sys

import pytest

from accelerate.launch import guard

pytestmark = [pytest.mark.cold, pytest.mark.skipif(os.name != "posix", reason="process groups are those of POSIX")]
SLEEP = "import time; print('up', flush=True); time.sleep(300)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.fixture
def group():
    """Start programs, each in a separate group, and wait until they run."""
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
    guard.end_groups([asked.pid, deaf.pid], grace=30)  # no process is left to wait for


def test_it_holds_no_output_of_the_launcher_open():
    program = (
        "from accelerate.launch.guard import Guard; import os, signal; g = Guard(); "
        "print(g._process.pid, flush=True); os.kill(g._process.pid, signal.SIGSTOP); os._exit(0)"
    )
    # A guard that is stopped still exists; a reader of the launcher's output must see its end all the same.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 0
