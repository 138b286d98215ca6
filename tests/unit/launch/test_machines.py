"""Which machines take part, where they meet, and what a scheduler adds."""

import pytest

from accelerate.launch import cluster
from accelerate.launch.cluster import Cluster
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Machines, Rendezvous, Source
from accelerate.runtime.ranks import Ranks

TWO = "--cpu --num_machines 2 --num_processes 4 --main_process_ip 10.0.0.1 --main_process_port 29501"


@pytest.fixture
def scheduler(monkeypatch):
    def says(**fields):
        known = {
            "machines": 2,
            "machine_rank": 1,
            "address": "node1",
            "port": 23456,
            "task": None,
            "detail": "SLURM_NNODES",
        }
        found = Cluster(source="Slurm", **{**known, **fields})
        monkeypatch.setattr(cluster, "find", lambda environ, hostname=None: found)

    return says


@pytest.fixture
def file(place):
    def write(text):
        folder = place / "home" / "accelerate"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "default_config.yaml").write_text(text)

    return write


def test_two_machines(plan):
    result = plan(f"{TWO} --machine_rank 1")
    assert result.runner == "machines" and result.elastic
    assert result.machines == Machines(2, 1) and result.local_processes == 2
    assert result.rendezvous == Rendezvous("static", "10.0.0.1", 29501)
    assert result.settings["num_cpu_threads_per_process"].value == 4, "8 cores, two processes here"


def test_one_process_each(plan):
    assert plan(f"{TWO} --machine_rank 0 --num_processes 2").local_processes == 1


def test_the_number_of_processes_follows_the_devices(plan, gpus):
    gpus(4)
    result = plan("--num_machines 2 --machine_rank 0 --main_process_ip a")
    assert result.num_processes == 8 and "on each of 2 machines" in result.settings["num_processes"].origin
    assert plan("--cpu --num_machines 3 --machine_rank 0 --main_process_ip a").num_processes == 3


def test_the_port_has_a_default_that_all_know(plan):
    result = plan("--cpu --num_machines 2 --machine_rank 0 --main_process_ip a")
    assert result.rendezvous.port == 29500 and result.settings["main_process_port"].origin == "torch's default"


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("--num_machines 2 --main_process_ip a", "--machine_rank, from 0 to 1"),
        ("--num_machines 2 --machine_rank 0", "Give --main_process_ip"),
        ("--num_machines 2 --machine_rank 2 --main_process_ip a", "numbered from 0 to 1"),
        ("--num_machines 2 --machine_rank -1 --main_process_ip a", "numbered from 0 to 1"),
        ("--num_machines 0", "at least 1"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --main_process_port 0", "must all know the port"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --main_process_port 70000", "1 to 65535"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --num_processes 3", "shared evenly by 2"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --num_processes 1", "Ask for 2"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --rdzv_backend zeus", "static, c10d"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --rdzv_conf timeout", "key=value"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --rdzv_conf join_timeout=soon", "seconds above 0"),
        ("--num_machines 2 --machine_rank 0 --main_process_ip a --rdzv_conf heartbeat_timeout=0", "seconds above 0"),
        ("--num_processes 2 --rdzv_backend etcd", "c10d does the same"),
    ],
)
def test_what_does_not_fit(plan, line, fragment):
    with pytest.raises(LaunchError, match=fragment):
        plan(f"--cpu {line}")


def test_too_many_for_the_devices_of_each(plan, gpus):
    gpus(4)
    with pytest.raises(LaunchError, match="5 for each of 2 machines, and there are 4 cuda devices.*at most 8"):
        plan("--num_machines 2 --num_processes 10 --machine_rank 0 --main_process_ip a")


def test_numbers_are_given_by_the_rendezvous(plan):
    assert plan(f"{TWO} --rdzv_backend c10d").machines == Machines(2, None)


def test_settings_that_mean_nothing_here_are_named(plan):
    notes = plan(f"{TWO} --machine_rank 0 --rdzv_conf join_timeout=5,last_call_timeout=3").notes
    assert any("last_call_timeout=3 has no effect" in note for note in notes) and len(notes) == 2


def test_restarts_need_a_rendezvous_to_come_back_to(plan):
    result = plan(f"{TWO} --machine_rank 0 --max_restarts 2")
    assert result.rendezvous.backend == "c10d" and any("--max_restarts" in note for note in result.notes)
    assert (
        plan(f"{TWO} --machine_rank 0 --max_restarts 2 --rdzv_backend c10d").notes
        == plan(f"{TWO} --machine_rank 0").notes
    )


# -- a scheduler -----------------------------------------------------------------------------------------------------


def test_a_scheduler_fills_in(plan, scheduler):
    scheduler()
    result = plan("--cpu --num_processes 4")
    assert result.machines == Machines(2, 1, "Slurm") and result.local_processes == 2
    assert (result.rendezvous.host, result.rendezvous.port) == ("node1", 23456)
    assert result.settings["num_machines"].source is Source.ENVIRONMENT
    assert result.settings["num_machines"].origin == "Slurm (SLURM_NNODES)"


def test_the_command_line_wins_over_a_scheduler(plan, scheduler):
    scheduler()
    result = plan(f"{TWO} --machine_rank 0")
    assert result.machines == Machines(2, 0) and result.rendezvous.host == "10.0.0.1"
    result = plan("--cpu --num_machines 1")
    assert result.machines == Machines() and "Slurm is not asked" in result.notes[0]


def test_a_scheduler_wins_over_a_file(plan, scheduler, file):
    scheduler()
    file("{distributed_type: NO, num_machines: 1, machine_rank: 0, num_processes: 2, main_process_ip: old}")
    result = plan("--cpu")
    assert result.machines == Machines(2, 1, "Slurm") and result.rendezvous.host == "node1"
    assert any("main_process_ip is 'node1' (from Slurm), not 'old'" in note for note in result.notes)


def test_each_task_of_a_scheduler_is_a_process(plan, scheduler):
    scheduler(task=Ranks(3, 4, 1, 2, "Slurm"))
    result = plan("--cpu")
    assert result.runner == "single" and result.num_processes == 4
    assert dict(result.extra) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "23456",
    }
    assert result["num_cpu_threads_per_process"] == 4, "two tasks share the 8 cores"
    with pytest.raises(LaunchError, match="Slurm has started 4 tasks"):
        plan("--cpu --num_processes 8")
    assert plan("--cpu --num_processes 4").num_processes == 4


def test_tasks_of_one_machine_meet_there(plan, scheduler):
    scheduler(machines=1, machine_rank=0, address=None, port=None, task=Ranks(1, 2, 1, 2, "Open MPI"))
    result = plan("--cpu")
    assert result.extra["MASTER_ADDR"] == "127.0.0.1" and result.extra["MASTER_PORT"] == "29500"


def test_only_the_first_task_tells_notes(plan, scheduler):
    scheduler(machines=1, machine_rank=0, task=Ranks(0, 2, 0, 2, "MPI"))
    assert any("OMP_NUM_THREADS" in note for note in plan("--cpu").notes)
    scheduler(machines=1, machine_rank=0, task=Ranks(1, 2, 1, 2, "MPI"))
    assert plan("--cpu").notes == ()


def test_tasks_of_several_machines_need_an_address(plan, scheduler):
    scheduler(address=None, port=None, task=Ranks(1, 4, 1, 2, "Open MPI"))
    with pytest.raises(LaunchError, match="--main_process_ip"):
        plan("--cpu")
    assert plan("--cpu --main_process_ip a").extra["MASTER_ADDR"] == "a"


def test_notes_of_a_scheduler_are_passed_on(plan, scheduler):
    scheduler(machines=1, machine_rank=0, notes=("the allocation has 4 nodes",))
    result = plan("--cpu")
    assert result.notes[0] == "the allocation has 4 nodes" and result.machines == Machines()
