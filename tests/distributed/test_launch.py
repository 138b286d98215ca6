"""Real launches: processes cooperate, failures are reported once, output goes into files, and nothing clashes."""

import json
import os
import sys

import pytest

import warm
from accelerate.commands.launch import launch_command_parser
from accelerate.launch import runners
from accelerate.launch.resolve import resolve
from distributed.conftest import LAUNCH_ON_CPU, begun, lines_without_gloo, plain_environment

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
    return plain_environment(tmp_path / "home")


@pytest.fixture
def start(tmp_path, environment):
    """Start a command, by default a launch with further words; its output is read by `communicate`."""

    def start(*words, command=LAUNCH_ON_CPU):
        return begun([*command, *words], cwd=tmp_path, env=environment)

    return start


@pytest.fixture
def run(start):
    """Run a launch to its end; returns exit status, output and errors."""

    def run(*words, **options):
        job = start(*words, **options)
        out, err = job.communicate(timeout=120)
        return job.returncode, out, err

    return run


@pytest.mark.cold
def test_one_process_replaces_the_launcher(start, script):
    alone = start(script("import os, sys; print(os.getpid(), 'torch' in sys.modules)"))
    assert alone.communicate(timeout=60)[0] == f"{alone.pid} False\n"


def test_two_jobs_run_at_once(start, script):
    jobs = [start("--num_processes", "2", script(MEET)) for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, err
        lines = sorted(lines_without_gloo(out))
        assert [line[:21] for line in lines] == ["rank 0 of 2 sum 2 thr", "rank 1 of 2 sum 2 thr"]
        assert "OMP_NUM_THREADS=" in err


# Rank 1 fails; rank 0 loses its peer in a collective, or waits without torch where that is not the question.
LOSES_ITS_PEER = """
import os, sys, torch, torch.distributed as dist
from accelerate import PartialState
state = PartialState()
def fail():
    raise ValueError("what went wrong")
if state.process_index == 1:
    {how}
dist.all_reduce(torch.ones(1))
"""
WAITS = """
import os, sys, time
if os.environ["RANK"] == "1":
    {how}
time.sleep(60)
"""


# As the first import of a state does, which imports torch.
WATCH = "from accelerate.runtime import failure; failure.watch()"


def test_one_traceback_by_rank_and_who_followed(run, script):
    status, _, err = run("--num_processes", "2", script(LOSES_ITS_PEER.replace("{how}", "fail()")))
    assert status == 1
    assert err.count("Traceback (most recent call last)") == 1
    before, _, after = err.partition("ValueError: what went wrong\n")
    assert "accelerate launch: rank 1 on " in before and "in fail\n" in before
    assert "rank 0 failed because another rank had gone: " in after or "rank 0 ended because the launcher" in after
    assert "rank 1 (pid " in after and "failed with exit status 1; its traceback stands above" in after


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize(
    ("text", "how", "status", "fragment"),
    [
        (WAITS, "sys.exit(3)", 3, "rank 1 (pid {}) failed with exit status 3; its own messages"),
        (LOSES_ITS_PEER, "os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL: "),
        (WAITS, f"{WATCH}; import faulthandler; faulthandler._sigsegv()", 139, "Segmentation fault"),
    ],
    ids=["exit", "kill", "fault"],
)
def test_the_first_failure_is_reported_without_a_traceback_of_its_own(run, script, text, how, status, fragment):
    text = text.replace("{how}", f"print('pid', os.getpid(), flush=True); {how}")
    # The ranks are real children of the launcher, which may be forked from a warm server.
    got, out, err = run("--num_processes", "2", "--no_python", warm.REAL, script(text))
    pid = out.split("pid ")[1].split()[0]
    assert got == status, err
    assert fragment.replace("{}", pid) in err
    assert f"rank 1 (pid {pid}) " in err.splitlines()[-1]
    assert "Traceback" not in err  # the other rank's, which lost its peer


def test_a_launch_from_a_program_raises(run, script):
    script(WAITS.replace("{how}", "raise ValueError('what went wrong')"))
    program = (
        "from accelerate.commands.launch import launch_command, launch_command_parser\n"
        "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n"
        "try:\n"
        "    launch_command(launch_command_parser().parse_args(['--cpu', '--num_processes', '2', 'script.py']))\n"
        "except ChildFailedError as error:\n"
        "    print('caught', sorted(error.failures))"
    )
    status, out, err = run(command=[sys.executable, "-c", program])
    assert status == 0 and out.startswith("caught [")
    assert err.count("ValueError: what went wrong") == 1


@pytest.mark.parametrize("options", [[], pytest.param(["--tee", "3"], marks=pytest.mark.slow)], ids=str)
def test_all_ranks_fail_alike_and_start_again(run, script, options):
    text = """
import os, torch.distributed as dist
from accelerate import PartialState
dist.init_process_group("gloo"); dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("of the first attempt")
dist.barrier(); print("joined again"); dist.destroy_process_group()
"""
    status, out, err = run("--num_processes", "2", "--max_restarts", "1", *options, script(text))
    assert status == 0, err
    assert out.count("joined again") == 2
    assert (out + err).count("RuntimeError: of the first attempt") == 1, "of all ranks, once"
    assert "failed with the same error" in err or "ended because the launcher stopped the run" in err
    assert "failed in attempt 1 of 2:" in err and "start again: attempt 2 of 2" in err


def test_output_of_some_ranks_goes_into_files_and_so_does_a_traceback(run, script, tmp_path):
    script(LOSES_ITS_PEER.replace("{how}", r"print('out\33[1m'); fail()"))
    words = ("--num_processes", "2", "--log_dir", "logs", "--tee", "1:3", "--role", "mine", "script.py")
    _, out, err = run(*words)
    folders = {file.parent.name for file in (tmp_path / "logs").rglob("*.log") if file.name != "fault.log"}
    assert folders == {"1"} and "[mine1]:out\33[1m\n" in out, "what a rank prints is its own"
    (log,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert "ValueError: what went wrong" in log.read_text()
    assert (log.parent / "error.json").exists() and err.count("ValueError: what went wrong") == 1


# What torch adds when it starts a process, with values that no plan has.
STARTED = {"ACCELERATE_LAUNCHER_PID", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
STARTED |= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
STARTED |= {"ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"}
STARTED |= {f"TORCHELASTIC_{name}" for name in ("ERROR_FILE", "RUN_ID", "SIGNALS_TO_HANDLE", "USE_AGENT_STORE")}


@pytest.mark.parametrize("options", [[], ["--num_processes", "2", "--mixed_precision", "bf16"]])
def test_what_is_started_is_what_was_planned(run, script, tmp_path, environment, monkeypatch, options):
    text = "import json, os\njson.dump(dict(os.environ), open('rank' + os.environ.get('RANK', ''), 'w'))"
    assert run(*options, script(text))[0] == 0
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", environment["HF_HOME"])
    plan = resolve(launch_command_parser().parse_args(["--cpu", *options, "script.py"]))
    planned = runners.process(plan).environment
    wanted = {name: value for name, value in planned.items() if not name.startswith("PYTEST_")}
    started = [json.loads(path.read_text()) for path in tmp_path.glob("rank*")]
    for real in started:
        assert {name: real.get(name) for name in wanted} == wanted
        assert set(real) - set(planned) <= {"LC_CTYPE", *(STARTED if plan.elastic else ())}
    assert len(started) == plan.num_processes
