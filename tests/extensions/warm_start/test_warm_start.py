"""Warm starts: ranks that are forked from one process behave as those that are started, and end with their launcher."""

import re
import signal
import subprocess
import sys

import psutil
import pytest

from accelerate.extensions.dry_run.text import show
from accelerate.launch.errors import LaunchError
from accelerate.launch.resolve import resolve
from accelerate.utils.other import get_free_port
from cases import cases
from distributed.conftest import LIMIT_S, begun, done, gone, launch_command, lines_without_gloo, plain_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
# Rank 1 fails after a step. What a program can see of its interpreter is printed, and a file is left open.
PROGRAM = """
import atexit, os, random, sys, time
import numpy, torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator()
open("unseeded", "a").write(f"{torch.rand(1).item()} {numpy.random.rand()} {random.random()}\\n")
set_seed(3)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
loss = model(torch.randn(8, 4)).pow(2).mean()
accelerator.backward(loss)
optimizer.step()
numbers = loss.item(), random.random(), numpy.random.rand(), torch.get_num_threads(), torch.get_num_interop_threads()
interpreter = __name__, __file__, __spec__ and __spec__.name, sys.argv, sys.path, os.getcwd(), sys.stdout.write_through
left_open = open(f"left_open_{accelerator.process_index}", "w")
left_open.write("written")
atexit.register(print, "at exit")
print(f"{accelerator.process_index} {numbers} {interpreter}\\n", end="")  # in one piece
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    raise ValueError("what went wrong")
time.sleep(300)
"""
COUNTED = "open('imports', 'a').write('import\\n')"
# Rank 1 fails in the first attempt.
FAILS_ONCE = """
import os
import counted
from accelerate import PartialState

state = PartialState()
state.wait_for_everyone()
if state.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("what went wrong")
state.wait_for_everyone()
print(f"done {state.process_index}\\n", end="")
"""
# Each rank starts a separate process, and says when both are up.
WAITS = """
import os, signal, subprocess, sys, time
from accelerate import PartialState

state = PartialState()
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(7))
child = subprocess.Popen(["sleep", "300"])
print(f"up {os.getpid()} {child.pid}\\n", end="", flush=True)
time.sleep(300)
"""


@pytest.fixture
def start(tmp_path):
    """Start a program on two ranks, or as further words say."""

    def start(text, *words, script="script.py", how=begun, warm=True, processes=2):
        (tmp_path / "script.py").write_text(text)
        command = [*launch_command(processes, cpu=True), *(["--warm_start"] if warm else []), *words, script]
        environment = plain_environment(tmp_path / "home", OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))
        return how(command, cwd=tmp_path, env=environment)

    return start


def test_restarted_ranks_are_forked_from_the_same_process(start, tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    job = start(FAILS_ONCE, "--preload", "counted", "--max_restarts", "1", how=done)
    assert job.returncode == 0, job.stderr
    assert sorted(lines_without_gloo(job.stdout))[-2:] == ["done 0", "done 1"]
    assert (tmp_path / "imports").read_text() == "import\n"
    assert "failed in attempt 1 of 2:\nTraceback (most recent call last):\n" in job.stderr
    assert f'last):\n  File "{tmp_path}/script.py", line 9, in <module>\n' in job.stderr
    assert "starts cold" not in job.stderr


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]], ids=["script", "module"])
def test_ranks_train_and_fail_as_in_a_cold_start(start, tmp_path, words):
    *options, script = words
    jobs = [start(PROGRAM, *options, script=script, how=done, warm=warm) for warm in (False, True)]
    cold, warm = [(job.returncode, sorted(lines_without_gloo(job.stdout))) for job in jobs]
    assert warm == cold and cold[0] == 1, jobs[1].stderr
    errors = [re.sub(r"pid \d+", "pid", job.stderr) for job in jobs]
    assert errors[0] == errors[1] and errors[1].count("ValueError: what went wrong") == 1
    assert (tmp_path / "left_open_1").read_text() == "written"
    numbers = (tmp_path / "unseeded").read_text().split()[-6:]  # of the warm start
    assert len(set(numbers)) == 6


@cases(
    ("how", "status", "message"),
    ("sys.exit(3)", 3, "rank 1 (pid {}) failed with exit status 3"),
    ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ("import faulthandler; faulthandler._sigsegv()", 139, "Segmentation fault"),
    ids=["exit", "kill", "fault"],
)
def test_exit_statuses_and_signals_of_ranks_are_reported(start, how, status, message):
    waits = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {how}\ntime.sleep(300)"
    job = start(waits, how=done)
    assert job.returncode == status, job.stderr
    assert message in re.sub(r"pid \d+", "pid {}", job.stderr)


def test_one_process_ends_with_the_status_of_its_script(start):
    job = start("import sys; print(sys.argv, end=''); sys.exit(5)", how=done, processes=1)
    assert (job.returncode, job.stdout) == (5, "['script.py']")


class Job:
    """A warm launch whose two ranks are up."""

    def __init__(self, folder, launch):
        self.launch = launch
        self.started = []
        while len(self.started) < 4 and (line := launch.stdout.readline()):
            if line.startswith("up "):  # torch 2.9 prints lines of gloo, too
                self.started += [psutil.Process(int(word)) for word in line.split()[1:]]
        clients = [
            process for process in psutil.process_iter(["cmdline", "cwd"]) if process.info["cwd"] == str(folder)
        ]
        clients = [process for process in clients if "warm_start/client.py" in " ".join(process.info["cmdline"])]
        # A stand-in for the interpreter may have started the server, which then is no child of the launcher.
        self.client, self.server, self.launcher = clients[0], self.started[0].parent(), clients[0].parent()
        self.all = [*self.launcher.children(recursive=True), self.server, *self.started]

    def end(self):
        """Wait, and return status and errors; everything that was started must be gone."""
        _, errors = self.launch.communicate(timeout=LIMIT_S)
        gone(self.all)
        return self.launch.returncode, errors


SLOW = pytest.mark.slow


@pytest.mark.usefixtures("interruptible")
@cases(
    ("receiver", "number", "status"),
    pytest.param("launcher", signal.SIGTERM, 143, marks=SLOW),
    pytest.param("launcher", signal.SIGINT, 130, marks=SLOW),
    pytest.param("launcher", signal.SIGUSR1, 7, marks=SLOW),
    ("launcher", signal.SIGKILL, -signal.SIGKILL),
    pytest.param("client", signal.SIGKILL, 137, marks=SLOW),
    ("server", signal.SIGKILL, 70),
    ids=["TERM", "INT", "USR1", "launcher-KILL", "client-KILL", "server-KILL"],
)
def test_a_signal_reaches_the_ranks_and_leaves_no_orphans(start, tmp_path, receiver, number, status):
    job = Job(tmp_path, start(WAITS))
    getattr(job, receiver).send_signal(number)
    ended, errors = job.end()
    assert ended == status, errors


@SLOW
def test_stacks_of_warm_ranks_are_printed(start, tmp_path):
    job = Job(tmp_path, start(WAITS))
    try:
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "stacks",
            "--job",
            str(job.launcher.pid),
        ]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S).stdout
    finally:
        job.launch.terminate()
        job.end()
    assert printed.count('script.py", line 9 in <module>') == 2 and "-- rank 1, pid " in printed


def test_a_server_that_was_killed_is_replaced_by_cold_starts(start):
    kill_server = (
        "import os, signal\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.environ['RANK'] == '1' or os.kill(os.getppid(), 9)\n"
    )
    job = start(f"{kill_server}    signal.pause()\nprint('done\\n', end='')", "--max_restarts", "1", how=done)
    assert (job.returncode, job.stdout) == (0, "done\ndone\n"), job.stderr
    assert job.stderr.count("this rank starts cold") >= 2


# -- refusals ----------------------------------------------------------------------------------------------------------------


@cases(
    ("line", "reason"),
    ("--cpu --preload json", "--preload is 'json', which only --warm_start reads"),
    ("--cpu --warm_start --no_python", "--no_python runs a program"),
    ("--cpu --warm_start --mpirun_hostfile hosts", "--warm_start: Launching through mpirun"),
    ids=["preload", "no_python", "mpirun"],
)
def test_options_that_contradict_a_warm_start_are_refused(place, parse, found_or_refused, line, reason):
    (place / "hosts").write_text("localhost")
    (place / "train.py").touch()
    script = sys.executable if "--no_python" in line else "train.py"
    found_or_refused(reason, resolve, parse(f"{line} {script}"))


def test_tasks_of_a_scheduler_are_refused(place, plan):
    (place / "train.py").touch()
    tasks = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    tasks |= {"SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    with pytest.raises(LaunchError, match="Slurm has started a launch for each process"):
        plan("--cpu --warm_start", tasks)


def test_a_dry_run_prints_the_ranks_of_a_cold_start(place, plan):
    (place / "train.py").touch()
    text = show(plan("--cpu --num_processes 2 --warm_start --preload json"))
    assert f"each of 2 processes: {sys.executable} -u train.py" in text and "preload" in text


def test_modules_that_a_fork_would_break_are_refused(tmp_path):
    modules = {
        "uses_cuda": "import torch; torch.cuda.is_initialized = lambda: True",
        "opens_cuda": f"file = open({str(tmp_path / 'nvidia-uvm')!r}, 'w')",
        "has_thread": "import threading; threading.Thread(target=threading.Event().wait, name='reader', daemon=True).start()",
        "fails": "raise KeyError('key')",
        "harmless": "",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    program = (
        "import os, sys\nfrom accelerate.extensions.warm_start import server\n"
        f"server._CUDA_FILE = {str(tmp_path / 'nvidia-uvm')!r}\n"
        "for name in sys.argv[1:]:\n    if os.fork() == 0:\n        print(server.preload(['torch', name]))\n        break\n"
        "    os.wait()\n"
    )
    environment = plain_environment(tmp_path, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    printed = done([sys.executable, "-c", program, *modules], env=environment).stdout.splitlines()
    lost = "which a forked process cannot use. Remove it from --preload"
    assert printed == [
        f"importing uses_cuda initialises CUDA, {lost}",
        f"importing opens_cuda initialises CUDA, {lost}",
        f"importing has_thread starts the threads reader, {lost}",
        "the module fails cannot be imported: KeyError: 'key'",
        "",
    ]


def test_a_launch_names_the_module_that_cannot_be_imported(start):
    job = start("", "--preload", "json,no_such_module", how=done)
    assert job.returncode == 2
    message = "--warm_start: the module no_such_module cannot be imported: ModuleNotFoundError"
    assert f"accelerate launch: error: {message}" in job.stderr


@pytest.mark.slow
@pytest.mark.cold
def test_ranks_of_two_machines_are_forked(start, tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    port = str(get_free_port())
    words = [
        "--preload",
        "counted",
        "--num_machines",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        port,
    ]
    words += ["--max_restarts", "1"]
    jobs = [start(FAILS_ONCE, *words, "--machine_rank", rank) for rank in ("0", "1")]
    outputs = [job.communicate(timeout=LIMIT_S) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert "done 0" in outputs[0][0] and "done 1" in outputs[1][0]
    assert (tmp_path / "imports").read_text() == "import\n" * 2
    assert f'last):\n  File "{tmp_path}/script.py", line 9, in <module>\n' in outputs[1][1]
