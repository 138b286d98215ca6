"""Real launches: processes cooperate, failures and signals leave nothing behind, and nothing clashes."""

import os
import signal
import subprocess
import sys
import time

import pytest

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
MEET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1); dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} sum {int(total)} threads {os.environ['OMP_NUM_THREADS']}\\n", end="")
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "script.py").write_text(text)
        return "script.py"

    return write


@pytest.fixture
def environment(tmp_path):
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("ACCELERATE_", "OMP_")) and k not in ("RANK", "WORLD_SIZE")
    }
    return {**kept, "HF_HOME": str(tmp_path / "home")}


@pytest.fixture
def run(tmp_path, environment):
    def run(*words, **variables):
        return subprocess.run(
            [*LAUNCH, *words],
            cwd=tmp_path,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_two_processes_and_two_jobs_at_once(script, tmp_path, environment):
    command = [*LAUNCH, "--num_processes", "2", script(MEET)]
    jobs = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)
    ]
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, err
        lines = sorted(line for line in out.splitlines() if line)
        assert [line[:21] for line in lines] == ["rank 0 of 2 sum 2 thr", "rank 1 of 2 sum 2 thr"]
        assert "OMP_NUM_THREADS=" in err


def test_one_process_replaces_the_launcher(script, tmp_path, environment):
    job = subprocess.Popen(
        [*LAUNCH, script("import os, sys; print(os.getpid(), 'torch' in sys.modules)")],
        cwd=tmp_path,
        env=environment,
        stdout=-1,
        text=True,
    )
    assert job.communicate(timeout=60)[0] == f"{job.pid} False\n"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_exit_status_and_traceback_are_kept(run, script, processes):
    text = "import os, sys\nif os.environ.get('RANK', '0') != '0': __import__('time').sleep(60)\nraise SystemExit(3)"
    assert run("--num_processes", processes, script(text)).returncode == 3
    done = run("--num_processes", processes, script("raise ValueError('what went wrong')"))
    assert done.returncode == 1
    assert "ValueError: what went wrong" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_no_orphans(script, tmp_path, environment, number):
    text = "import os, pathlib, time\npathlib.Path('pid' + os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(300)"
    command = [*LAUNCH, "--num_processes", "2", script(text)]
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=-1, stderr=-1, start_new_session=True)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(number)
    job.communicate(timeout=60)
    assert job.returncode == 128 + number
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_restart(run, script, tmp_path):
    text = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo"); dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(4)
dist.barrier(); print("joined again"); dist.destroy_process_group()
"""
    done = run("--num_processes", "2", "--max_restarts", "1", script(text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("joined again") == 2


def test_nothing_starts_without_a_script(run):
    done = run("--num_processes", "2", "none.py")
    assert done.returncode == 2
    assert done.stderr.startswith("accelerate launch: error: There is no script 'none.py'")


def test_module_and_program(run):
    assert "usage" in run("-m", "json.tool", "--help").stdout
    assert run("--no_python", "echo", "hello").stdout == "hello\n"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_self_check(run, processes):
    done = run("--num_processes", processes, "-m", "accelerate.test_utils.scripts.test_script")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "All checks passed." in done.stdout
