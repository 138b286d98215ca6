"""Real launches: processes cooperate, failures are told once, output goes into files, and nothing clashes."""

import json
import os
import subprocess
import sys

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.launch import runners
from accelerate.launch.resolve import resolve

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
        if not k.startswith(("ACCELERATE_", "OMP_", "PYTEST_")) and k not in ("RANK", "WORLD_SIZE")
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


FAIL = """
import os, sys, torch, torch.distributed as dist
from accelerate import PartialState
state = PartialState()
def fail():
    raise ValueError("what went wrong")
if state.process_index == 1 or "all" in sys.argv:
    {how}
dist.all_reduce(torch.ones(1))
"""


def failing(script, how):
    return script(FAIL.replace("{how}", how))


def test_one_traceback_by_rank_and_who_followed(run, script):
    done = run("--num_processes", "2", failing(script, "fail()"))
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    before, _, after = done.stderr.partition("ValueError: what went wrong\n")
    assert "accelerate launch: rank 1 on " in before and "in fail\n" in before
    assert "rank 0 failed because another rank had gone: " in after or "rank 0 ended because the launcher" in after
    assert "rank 1 (pid " in after and "failed with exit status 1; its traceback stands above" in after


def test_the_same_failure_of_all_ranks_is_shown_once(run, script):
    for options in ([], ["--tee", "3"]):
        done = run("--num_processes", "2", *options, failing(script, "fail()"), "all")
        text = done.stdout + done.stderr
        assert done.returncode == 1 and text.count("ValueError: what went wrong") == 1, text
        assert "failed with the same error" in text or "ended because the launcher stopped the run" in text


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize(
    ("how", "status", "fragment"),
    [
        ("sys.exit(3)", 3, "rank 1 (pid {}) failed with exit status 3; its own messages"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL: "),
        ("import faulthandler; faulthandler._sigsegv()", 139, "Segmentation fault"),
    ],
)
def test_the_first_who_ended_is_told_though_it_left_no_traceback(run, script, how, status, fragment):
    done = run("--num_processes", "2", failing(script, f"print('pid', os.getpid(), flush=True); {how}"))
    pid = done.stdout.split("pid ")[1].split()[0]
    assert done.returncode == status, done.stderr
    assert fragment.replace("{}", pid) in done.stderr
    assert f"rank 1 (pid {pid}) " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr  # the other rank's, which lost its peer


def test_a_launch_from_a_program_raises(tmp_path, environment, script):
    failing(script, "fail()")
    program = (
        "from accelerate.commands.launch import launch_command, launch_command_parser\n"
        "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n"
        "try:\n"
        "    launch_command(launch_command_parser().parse_args(['--cpu', '--num_processes', '2', 'script.py']))\n"
        "except ChildFailedError as error:\n"
        "    print('caught', sorted(error.failures))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("caught [")
    assert done.stderr.count("ValueError: what went wrong") == 1


def test_restart(run, script, tmp_path):
    text = """
import os, sys, torch.distributed as dist
from accelerate import PartialState
dist.init_process_group("gloo"); dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("of the first attempt")
dist.barrier(); print("joined again"); dist.destroy_process_group()
"""
    done = run("--num_processes", "2", "--max_restarts", "1", script(text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("joined again") == 2
    assert done.stderr.count("RuntimeError: of the first attempt") == 1
    assert "failed in attempt 1 of 2:" in done.stderr and "start again: attempt 2 of 2" in done.stderr


def test_output_of_some_ranks_goes_into_files_and_so_does_a_traceback(run, script, tmp_path):
    failing(script, "print('out'); fail()")
    done = run("--num_processes", "2", "--log_dir", "logs", "--tee", "1:3", "--role", "mine", "script.py")
    folders = {file.parent.name for file in (tmp_path / "logs").rglob("*.log") if file.name != "fault.log"}
    assert folders == {"1"} and "[mine1]:out\n" in done.stdout
    (log,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert "ValueError: what went wrong" in log.read_text()
    assert (log.parent / "error.json").exists() and done.stderr.count("ValueError: what went wrong") == 1


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda pid: ())(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("options", [["--numa_affinity", "exclusive"], ["--enable_cpu_affinity"]])
def test_processes_get_processors_of_their_own(run, script, options):
    # One write a process, so that the lines of two do not mix.
    shown = "'on ' + ' '.join(map(str, os.sched_getaffinity(0))) + '\\n'"
    text = f"from accelerate import PartialState\nPartialState()\nimport os\nprint({shown}, end='')"
    done = run("--num_processes", "2", *options, script(text))
    masks = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("on ")]
    assert len(masks) == 2 and all(masks) and not masks[0] & masks[1], done.stdout + done.stderr


# What torch adds when it starts a process; nobody knows their values before, or cares.
STARTED = {"ACCELERATE_LAUNCHER_PID", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
STARTED |= {f"TORCHELASTIC_{name}" for name in ("ERROR_FILE", "RUN_ID", "SIGNALS_TO_HANDLE", "USE_AGENT_STORE")}


@pytest.mark.parametrize("options", [[], ["--num_processes", "2", "--mixed_precision", "bf16"]])
def test_what_is_started_is_what_was_planned(run, script, tmp_path, environment, monkeypatch, options):
    text = "import json, os\njson.dump(dict(os.environ), open('rank' + os.environ.get('RANK', ''), 'w'))"
    assert run(*options, script(text)).returncode == 0
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", environment["HF_HOME"])
    planned = runners.processes(resolve(launch_command_parser().parse_args(["--cpu", *options, "script.py"])))
    for process in planned:
        real = json.loads((tmp_path / f"rank{process.environment.get('RANK', '')}").read_text())
        wanted = {name: value for name, value in process.environment.items() if not name.startswith("PYTEST_")}
        assert {name: real.get(name) for name in wanted} == wanted
        assert set(real) - set(process.environment) <= STARTED | {"LC_CTYPE"}
    assert len(planned) == len(list(tmp_path.glob("rank*")))
