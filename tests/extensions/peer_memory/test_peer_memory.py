"""Copies in memory: runs that lose a rank, a machine, or a copy end exactly like runs that lose nothing; and how often copies are made."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accelerate import Accelerator
from accelerate.base.versions import is_torch_version
from accelerate.checkpoint.formats import describe
from accelerate.checkpoint.manifest import DamagedCheckpoint, FileEntry, Manifest
from accelerate.checkpoint.stored import TensorInMemory
from accelerate.extensions.peer_memory import resume
from accelerate.extensions.peer_memory.folder import Copy, Incoming, MemoryFolder, _writes, choices
from accelerate.extensions.peer_memory.options import Cadence, PeerMemoryKwargs, steps_between_copies
from accelerate.extensions.peer_memory.shards import _Shard
from accelerate.runtime import durable
from accelerate.utils.other import get_free_port
from distributed.conftest import begun, done, launch_command, plain_environment, stop, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are files of a RAM file system of Linux")
FSDP2 = pytest.mark.skipif(
    is_torch_version("<", "2.10"), reason="FSDP2 on several CPU processes needs torch 2.10 or newer"
)
SCRIPT = str(Path(__file__).parent / "peer_memory_run.py")


def command(folder: Path, strategy: str, fault: str, *options: str, processes: int = 2) -> list[str]:
    words = ["--max_restarts", "1", *options, SCRIPT, str(folder), strategy, fault]
    return [*launch_command(processes, cpu=True), *words]


def run(folder: Path, strategy: str, fault: str) -> dict:
    """Run the script, whose ranks compare losses and weights; return what they resumed from."""
    ended = done(command(folder, strategy, fault), env=plain_environment(folder, OMP_NUM_THREADS="1"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Gloo of torch 2.9 prints lines, too, in front of it or behind it.
    report, _ = json.JSONDecoder().raw_decode(ended.stdout[ended.stdout.index("{") :])
    return report | {"errors": ended.stderr}


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp2", marks=FSDP2)])
def test_killed_rank_resumes_from_memory(tmp_path, strategy):
    report = run(tmp_path, strategy, "rank")
    assert (report["source"], report["steps"], report["iteration"]) == ("memory", 6, 1)
    assert int((tmp_path / "size").read_text()) == 2  # copies before and after
    memory = (tmp_path / "memory").read_text()
    until(lambda: not os.path.exists(memory), "the memory is free after the end of the launcher")


@pytest.mark.slow
def test_copy_that_was_not_published_is_never_read(tmp_path):
    report = run(tmp_path, "ddp", "early")
    assert (report["source"], report["steps"]) == ("memory", 3)


def test_damaged_copies_are_refused(tmp_path):
    report = run(tmp_path, "ddp", "damage")
    assert (report["source"], report["steps"]) == ("disk", 2)
    assert report["errors"].count("random_states_1.pkl has changed") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=FSDP2)])
def test_lost_machine_resumes_from_its_peer(tmp_path, strategy):
    meet = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(get_free_port())]
    meet += ["--rdzv_conf", "join_timeout=60,heartbeat_timeout=20"]
    environment = plain_environment(tmp_path, OMP_NUM_THREADS="1")

    def start(machine: int):
        words = command(tmp_path, strategy, "machine", *meet, "--machine_rank", str(machine))
        return begun(words, env=environment, cwd=tmp_path)

    launchers = [start(0), start(1)]
    try:
        launchers[1].communicate(timeout=120)
        memory = (tmp_path / "memory").read_text()
        until(lambda: not os.path.exists(memory), "the memory of the lost machine is free")
        launchers[1] = start(1)
        outputs = [launcher.communicate(timeout=120) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
        report = json.loads(outputs[0][0])
        assert (report["source"], report["steps"]) == ("peer", 6)
    finally:
        stop(launchers)


# -- rules -------------------------------------------------------------------------------------------------------------


def test_steps_between_copies():
    assert steps_between_copies(0.35, 1.0, 0.035) == 10
    assert steps_between_copies(0.351, 1.0, 0.035) == 11
    assert steps_between_copies(0.0, 1.0, 0.035) == 1
    # Young and Daly: sqrt(2 * 0.5 s * 100 s) = 10 s.
    assert steps_between_copies(0.5, 1.0, 0.035, 100) == 10
    assert steps_between_copies(0.5, 1.0, 0.035, 1e6) == 15


def test_cadence_follows_what_copies_cost(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    cadence = Cadence(PeerMemoryKwargs())

    def steps(count: int, seconds: float, is_written: bool = True) -> None:
        for _ in range(count):
            clock[0] += seconds
            cadence.step_ended(is_written)

    steps(9, 0.5)
    assert not cadence.is_due
    steps(1, 0.5)
    assert cadence.is_due and cadence.step_s == 0.5
    cadence.agree(0.07, cadence.step_s)
    cadence.copied(0.07)
    assert cadence.every == 4 and not cadence.is_due
    steps(3, 0.75, is_written=False)  # next to the thread
    steps(1, 0.75)
    assert cadence.is_due and cadence.cost_s == pytest.approx(0.07 + 4 * 0.25) and cadence.step_s == 0.5
    cadence.agree(cadence.cost_s, cadence.step_s)
    assert cadence.every == 62
    cadence.resume_at(100)
    steps(61, 0.5)
    assert not cadence.is_due
    steps(1, 0.5)
    assert cadence.is_due


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"every": "often"},
        {"max_overhead": 1.0},
        {"mean_time_between_failures_s": 0},
        {"mean_time_between_failures_s": 3600.0, "every": 50},
        {"max_overhead": 0.01, "every": 50},
    ],
)
def test_options_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PeerMemoryKwargs(**wrong)


def copy(save: str, *ranks: int, world_size: int = 4) -> Copy:
    return Copy(save, list(ranks), world_size, f"/{save}-{ranks[0]}")


MACHINES = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([[copy("a", 0, 1)], [copy("a", 2, 3)]], [("a", [0, 1])]),
        ([[copy("a", 0, 1), copy("a", 2, 3)], []], [("a", [0, 0])]),  # machine 1 has lost its memory
        ([[copy("a", 0, 1)], []], []),
        ([[copy("b", 0, 1), copy("a", 0, 1)], [copy("a", 2, 3)]], [("a", [0, 1])]),  # b was not completed
        ([[copy("b", 2, 3), copy("b", 0, 1)], [copy("b", 0, 1)]], [("b", [0, 0])]),
        ([[copy("a", 0, 1, world_size=8)], [copy("a", 2, 3, world_size=8)]], []),
    ],
)
def test_choice_of_copies(offers, expected):
    assert choices(offers, MACHINES) == expected


def test_received_file_is_compared_with_its_checksum(tmp_path):
    digest = durable.Checksum()
    digest.update(b"state")
    files = {
        "folder/file": FileEntry.made(5, digest.digests()),
        "empty": FileEntry.made(0, durable.Checksum().digests()),
    }
    writer = _writes(Incoming(0, str(tmp_path)), files)
    writer.send(torch.tensor(list(b"state"), dtype=torch.uint8))
    assert (tmp_path / "folder/file").read_bytes() == b"state" and (tmp_path / "empty").read_bytes() == b""
    with pytest.raises(OSError, match="rank 0 sent a copy that has changed: folder/file"):
        _writes(Incoming(0, str(tmp_path)), files).send(torch.tensor(list(b"stale"), dtype=torch.uint8))


def test_shard_of_another_layout_is_refused():
    shard = _Shard(TensorInMemory(torch.ones(2, 4)), [4, 4])
    shard.read_into(target := torch.zeros(2, 4), [2, 0])
    assert target.sum() == 8 and shard.shape == (4, 4)
    with pytest.raises(DamagedCheckpoint, match="shard of shape"):
        shard.read_into(torch.zeros(4, 4), [0, 0])


def test_truncated_copy_is_not_offered(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_LAUNCHER_PID", str(os.getpid()))
    folder = MemoryFolder(str(tmp_path))
    for save in ("a", "b"):
        path = Path(folder.partial(folder.local_copies, save))
        (path / "random_states_3.pkl").write_bytes(b"state")
        Manifest({"random_states_3.pkl": describe(path / "random_states_3.pkl")}, save=save, world_size=4).write(path)
    Path(folder.peer_copies).mkdir()
    assert folder.complete_copies() == []
    for save in ("a", "b"):
        folder.publish(folder.local_copies, save)
    (Path(folder.local_copies) / "b" / "random_states_3.pkl").write_bytes(b"stat")
    (offer,) = folder.complete_copies()
    assert (offer.save, offer.ranks, offer.world_size) == ("a", [3], 4)
    assert "random_states_3.pkl has 4 bytes, but 5 were written" in caplog.text


def test_copies_that_cannot_be_listed_are_none(tmp_path, caplog):
    folder = MemoryFolder(str(tmp_path))  # without the folders in it
    assert resume._complete_copies(SimpleNamespace(folder=folder)) == []
    assert "copies in the memory of this machine cannot be used: [Errno 2]" in caplog.text


def test_too_little_memory_is_refused_with_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_LAUNCHER_PID", str(os.getpid()))
    folder = MemoryFolder(str(tmp_path))
    Path(folder.path).mkdir()
    folder.require_room(1, 1)
    with pytest.raises(
        MemoryError, match=r"need 6\.55e\+04 GiB more .* two of this machine's state \(2\.05e\+04 GiB each\)"
    ):
        folder.require_room(20 << 40, 12 << 40)


def test_run_without_a_launcher_makes_no_copies():
    with pytest.warns(UserWarning, match="makes no copies here"):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[PeerMemoryKwargs()])
    assert accelerator.resume_from_memory() is None
    with pytest.raises(ValueError, match="Pass Accelerator"):
        Accelerator(cpu=True).resume_from_memory()
