"""Programs run alike in a process that the warm server forks and in a new interpreter."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

import warm

pytestmark = pytest.mark.skipif(sys.executable == warm.REAL, reason="WARM=0, or not Linux")
AS_SCRIPT = """
import atexit, os, sys, threading, time
atexit.register(print, "at exit")
thread = threading.Thread(target=lambda: (time.sleep(0.1), print("thread")))
thread.start()
print(__name__, __file__, sys.argv[1:], sys.path[:2], os.getcwd(), sys.stdin.read(), os.environ["NAME"])
def fail():
    raise ValueError("what went wrong")
if __name__ == "__main__":
    fail()
"""
PROGRAMS = {
    "script": ["script.py", "a", "b"],
    "module": ["-m", "json.tool", "absent.json"],
    "text": ["-c", "import sys; print(sys.argv, sys.path[0]); sys.exit('a message')", "a"],
    "status": ["-c", "raise SystemExit(3)"],
    "signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "interrupt": ["-c", "raise KeyboardInterrupt"],
    "syntax": ["-c", "1 +"],
    "unbuffered": ["-u", "-c", "import os; print('printed'); os._exit(0)"],
    "spawn": ["spawn.py"],
}
SPAWN = """
import multiprocessing, os
def work(queue):
    queue.put(multiprocessing.parent_process().pid == os.getppid())
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_program_ends_as_under_a_new_interpreter(tmp_path, program):
    (tmp_path / "script.py").write_text(AS_SCRIPT)
    (tmp_path / "spawn.py").write_text(SPAWN)
    options = {"cwd": tmp_path, "input": "typed", "capture_output": True, "text": True, "timeout": 60}
    environment = {**os.environ, "NAME": "value", "PYTHONPATH": str(tmp_path / "first")}
    forked, cold = (
        subprocess.run([python, *program], env=environment, **options) for python in (sys.executable, warm.REAL)
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def test_torch_is_imported_already_and_draws_differ():
    program = "import sys, numpy; print('torch' in sys.modules, numpy.random.rand())"
    lines = {subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(2)}
    assert len(lines) == 2 and all(line.startswith("True ") for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_stand_in_ends_its_process(number):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(client.stdout.readline())
    assert child != client.pid
    client.send_signal(number)
    assert client.wait(30) == -number
    assert client.stdout.read() == "", "the pipe ends when the child has ended"


def test_process_sees_the_disks_of_the_stand_in(tmp_path):
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs "{tmp_path}" && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount file systems")
    program = f"import os, sys; print('torch' in sys.modules, os.path.ismount({str(tmp_path)!r}))"
    assert subprocess.check_output([*mount, sys.executable, "-c", program], text=True) == "True True\n"


def test_an_ignored_signal_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        program = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
        assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True\n"
    finally:
        signal.signal(signal.SIGHUP, former)
