"""Several machines: launchers that meet, fail, restart and lose each other. Two hosts are two network namespaces of this one."""

import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelerate.runtime.failure import MACHINES
from accelerate.utils.other import get_free_port as free_port
from distributed.conftest import LAUNCH_ON_CPU, plain_environment, stop, until

pytestmark = pytest.mark.usefixtures("interruptible")
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
LIMIT_S = 120
MEET = """
import os, torch, torch.distributed as dist
from accelerate import PartialState
state = PartialState()
total = torch.ones(1); dist.all_reduce(total)
own = os.environ
print(f"rank {state.process_index} local {state.local_process_index} sum {int(total)} attempt {own['TORCHELASTIC_RESTART_COUNT']}\\n", end="", flush=True)
dist.barrier()
if own["TORCHELASTIC_RESTART_COUNT"] == "0" and own.get("FAIL_AT") == own["RANK"]:
    raise SystemExit(9)
dist.barrier()
print("done\\n", end="")
"""


class Job:
    """Launchers of one run, one a machine."""

    def __init__(self, folder: Path, inside: Callable[[int], list[str]] = lambda machine: []) -> None:
        self.folder, self.inside = folder, inside
        self.launchers: dict[int, subprocess.Popen] = {}

    def start(self, machine: int, *words: str, **variables: str) -> None:
        environment = plain_environment(self.folder / "home", OMP_NUM_THREADS="1", **variables)
        command = [*self.inside(machine), *LAUNCH_ON_CPU, *words]
        # Files, not pipes: what a launcher has said can be read while it runs.
        with open(self.folder / f"out{machine}", "w") as out, open(self.folder / f"err{machine}", "w") as err:
            streams = {"stdout": out, "stderr": err}
            self.launchers[machine] = subprocess.Popen(command, cwd=self.folder, env=environment, **streams)

    def end(self, machine: int) -> tuple[int, str, str]:
        """Wait for a launcher; return its exit status and what it printed."""
        status = self.launchers[machine].wait(timeout=LIMIT_S)
        del self.launchers[machine]
        return status, self.said(machine, "out"), self.said(machine)

    def said(self, machine: int, stream: str = "err") -> str:
        return (self.folder / f"{stream}{machine}").read_text()

    def wait_for(self, found: Callable[[], object], what: str) -> None:
        """Wait for something while the launchers run."""

        def found_or_ended() -> bool:
            ended = [machine for machine, launcher in self.launchers.items() if launcher.poll() is not None]
            assert not ended or found(), (what, [self.said(machine) for machine in ended])
            return bool(found())

        until(found_or_ended, what, LIMIT_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "script.py").write_text(MEET)
    job = Job(tmp_path)
    yield job
    stop(job.launchers.values())


def at(port: int, machine: int | None = None, processes: int = 4, **conf: int) -> list[str]:
    """Return the options of one of two machines that meet at a port of this host."""
    words = ["--num_machines", "2", "--num_processes", str(processes), "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", str(port), *([] if machine is None else ["--machine_rank", str(machine)])]
    settings = {"join_timeout": 60, "heartbeat_timeout": 30, **conf}
    return [*words, "--rdzv_conf", ",".join(f"{name}={value}" for name, value in settings.items())]


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_two_machines_meet_and_restart(job, backend):
    port = free_port()
    for machine in (1, 0):
        words = ["--rdzv_backend", backend, "--max_restarts", "1", "script.py"]
        job.start(machine, *at(port, machine), *words, FAIL_AT="3")
    ends = [job.end(machine) for machine in (0, 1)]
    for status, out, err in ends:
        assert status == 0, err
        assert out.count("attempt 1") == 2 and out.count("done") == 2
    lines = [line for _, out, _ in ends for line in out.splitlines() if "attempt 0" in line]
    assert sorted(lines) == [f"rank {rank} local {rank % 2} sum 4 attempt 0" for rank in range(4)]


@pytest.mark.slow
def test_a_machine_that_is_alone_ends_by_name(job):
    waited = "accelerate launch: Timed out after 2 s (--rdzv_conf join_timeout) waiting for machine 1 of 2 (numbered"
    alone = [  # a quiet launcher says what no other program can say
        (0, "127.0.0.1", waited),
        (1, "127.0.0.1", "waiting for machine 0 to answer at 127.0.0.1, port"),
        (1, "no-such-host.invalid", "The address 'no-such-host.invalid' cannot be looked up"),
    ]
    for launcher, (machine, host, _) in enumerate(alone):
        options = [host if word == "127.0.0.1" else word for word in at(free_port(), machine, join_timeout=2)]
        job.start(launcher, *options, "--quiet", "script.py")
    for launcher, (_, _, words) in enumerate(alone):
        status, _, err = job.end(launcher)
        assert status == 1 and words in err and "Traceback" not in err, err


def test_machines_that_disagree(job):
    port = free_port()
    for machine in (0, 1):
        job.start(machine, *at(port, machine, processes=2 + 2 * machine), "script.py")
    for machine in (0, 1):
        status, out, err = job.end(machine)
        assert status == 2 and "do not agree on processes of each machine" in err and "rank" not in out, err


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_failure_on_one_machine_ends_the_other(job, rank):
    port = free_port()
    for machine in (0, 1):
        job.start(machine, *at(port, machine), "--log_dir", "logs", "script.py", FAIL_AT=str(rank))
    ends = {machine: job.end(machine) for machine in (0, 1)}
    failed = rank // 2
    assert ends[failed][0] == 9 and f"rank {rank}" in ends[failed][2], ends
    status, _, err = ends[1 - failed]
    assert status != 0 and f"machine {failed} (" in err and f"rank {rank} ended with exit status 9" in err, err
    # In a shared folder, `accelerate diagnose` knows by the names which machines belong together.
    names = [folder.name for folder in (job.folder / "logs").iterdir()]
    assert len(names) == 2 and len({name[:-9] for name in names}) == 1 and names[0].startswith(MACHINES), names


WAIT = """
import signal, sys, time
from accelerate import PartialState
state = PartialState()
asked = []
if "save" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
print("up", flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(5 * (state.process_index == int(sys.argv[2])))  # what its save takes longer than the other's
raise SystemExit(75)
"""


def run_two(job: Job, options: Callable[[int], list[str]], *words: str) -> None:
    """Start two machines with a process each that wait for a signal, and wait until they do."""
    (job.folder / "wait.py").write_text(WAIT)
    for machine in (0, 1):
        job.start(machine, *options(machine), "wait.py", *words)
    job.wait_for(lambda: all("up" in job.said(machine, "out") for machine in (0, 1)), "the processes")


@pytest.fixture
def running(job):
    """Run two machines that wait for a signal."""

    def running(*words: str, options: tuple[str, ...] = (), **conf: int) -> Job:
        port = free_port()
        run_two(job, lambda machine: [*at(port, machine, processes=2, **conf), *options], *words)
        return job

    return running


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("slow", [0, 1])
def test_both_machines_save_themselves(running, slow):
    """The launcher whose process is quicker must neither take the store away nor be missed."""
    job = running("save", str(slow), heartbeat_timeout=3)
    for launcher in job.launchers.values():
        launcher.send_signal(signal.SIGTERM)
    for machine in (0, 1):
        status, _, err = job.end(machine)
        assert status == 75 and "it has saved itself" in err and "machine" not in err, err


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize(
    ("stopped", "number"), [pytest.param(0, signal.SIGINT, marks=pytest.mark.slow), (1, signal.SIGTERM)]
)
def test_a_machine_that_is_stopped_says_so(running, stopped, number):
    job = running()
    job.launchers[stopped].send_signal(number)
    assert job.end(stopped)[0] == 128 + number
    status, _, err = job.end(1 - stopped)
    assert status == 1 and err.count(f"was stopped by {number.name}. The processes") == 1, err
    assert "frame #" not in err, "what torch writes about its connections"


class Hosts:
    """Two network namespaces, joined by a cable."""

    def __init__(self) -> None:
        key = uuid.uuid4().hex[:6]
        self.names = [f"acc-{key}-{number}" for number in range(2)]
        self.cables = [f"ve{key}{number}" for number in range(2)]
        self.addresses = ["10.213.77.1", "10.213.77.2"]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Pull the cable out of the second host."""
        ip("-n", self.names[1], "link", "set", self.cables[1], "down")

    def mend(self) -> None:
        ip("-n", self.names[1], "link", "set", self.cables[1], "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def inside(self, machine: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[machine]]

    def options(self, machine: int | None, **conf: int) -> list[str]:
        words = at(29511, machine, **conf)
        words[words.index("127.0.0.1")] = self.addresses[0]
        return words


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Hosts, Job]]:
    if shutil.which("ip") is None:
        pytest.skip("the program `ip` (iproute2) is not installed")
    hosts = Hosts()
    try:
        hosts.make()
    except subprocess.CalledProcessError as error:
        hosts.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    job = Job(tmp_path, hosts.inside)
    yield hosts, job
    stop(job.launchers.values())
    hosts.remove()


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_run_by_name(hosts):
    hosts, job = hosts
    run_two(job, lambda machine: hosts.options(machine, processes=2, heartbeat_timeout=3))
    hosts.cut()
    for machine, other in ((0, r"machine 1 \(.*10\.213\.77\.2\)"), (1, r"machine 0 \(.*10\.213\.77\.1\)")):
        status, _, err = job.end(machine)
        assert status == 1 and re.search(rf"{other} has not answered for \d+ s", err), err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cable", "reboot"])
def test_a_host_that_comes_back_resumes_the_run(hosts, tmp_path, how):
    hosts, job = hosts
    folder = tmp_path / "saved"
    words = ["--rdzv_backend", "c10d", "--max_restarts", "3", DIGITS, "--epochs", "30", "--require-accuracy", "0.95"]
    words += ["--checkpoint_dir", str(folder), "--save_every", "10", "--resume", "auto"]
    for machine in (0, 1):
        job.start(machine, *hosts.options(machine, heartbeat_timeout=3), *words)
    job.wait_for(lambda: list(folder.glob("checkpoints/checkpoint_2")), "a checkpoint")
    hosts.cut()
    if how == "reboot":  # without a farewell
        pids = subprocess.run(["ip", "netns", "pids", hosts.names[1]], check=True, capture_output=True, text=True)
        subprocess.run(["kill", "-9", *pids.stdout.split()], check=True)
        job.end(1)
    # Fixed sooner, the connections of the processes break first, which is a failure like any other.
    for machine in (0, 1) if how == "cable" else (0,):
        job.wait_for(lambda at=machine: "has not answered" in job.said(at), f"machine {machine} to miss the other")
    hosts.mend()
    if how == "reboot":
        job.start(1, *hosts.options(1, heartbeat_timeout=3), *words)
    status, out, err = job.end(0)
    assert status == 0, err
    assert re.search(r"machine 1 \(.*\) has not answered", err)
    assert re.search(r"resumed from .*checkpoint_\d+", out)
    status, _, err = job.end(1)
    assert status == 0, err
