"""Which machines take part, where they meet, and what a scheduler adds."""

import pytest

from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Rendezvous, Source

TWO = "--cpu --num_machines 2 --num_processes 4 --main_process_ip 10.0.0.1 --main_process_port 29501"


@pytest.fixture
def srun(monkeypatch):
    """Be a task of a step of srun on the nodes n1, n2, ...; one on each node is a machine, several are processes."""

    def be(rank, node, tasks_per_node, **more):
        counts = [int(count) for count in tasks_per_node.split(",")]
        nodes, local = len(counts), rank - sum(counts[:node])
        step = {"ID": 0, "NUM_TASKS": sum(counts), "NUM_NODES": nodes, "TASKS_PER_NODE": tasks_per_node}
        step["NODELIST"] = f"n[1-{nodes}]"
        more |= {"SLURM_JOB_ID": 7, "SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}
        for name, value in {**{f"SLURM_STEP_{name}": value for name, value in step.items()}, **more}.items():
            monkeypatch.setenv(name, str(value))

    return be


def numbers(plan):
    return plan.rendezvous.machines, plan.rendezvous.machine


def test_each_gpu_of_each_machine_has_a_process(plan, gpus):
    gpus(4)
    assert plan("--num_machines 2 --machine_rank 0 --main_process_ip a").num_processes == 8


def test_settings_of_the_rendezvous(plan):
    notes = plan(f"{TWO} --machine_rank 0 --rdzv_conf join_timeout=5,last_call_timeout=3").notes
    assert any("last_call_timeout has no effect" in note for note in notes) and len(notes) == 2
    result = plan(f"{TWO} --machine_rank 0 --max_restarts 2")  # machines can come back to c10d
    assert result.rendezvous.backend == "c10d" and any("--max_restarts" in note for note in result.notes)
    notes = plan(f"{TWO} --machine_rank 0 --max_restarts 2 --rdzv_backend c10d").notes
    assert notes == plan(f"{TWO} --machine_rank 0").notes


def test_the_command_line_wins_over_a_scheduler_and_that_over_a_file(plan, srun, default_file):
    srun(1, 1, "1,1")
    result = plan("--cpu --num_processes 4")
    assert numbers(result) == (2, 1) and result.local_processes == 2
    assert result.rendezvous == Rendezvous("static", "n1", 20007, machines=2, machine=1)
    resolved = result.settings["num_machines"]
    assert (resolved.source, resolved.origin) == (Source.ENVIRONMENT, "Slurm")
    result = plan(f"{TWO} --machine_rank 0")
    assert numbers(result) == (2, 0) and result.rendezvous.host == "10.0.0.1"
    result = plan("--cpu --num_machines 1")
    assert numbers(result) == (1, 0) and "not 2 as with Slurm" in result.notes[0]
    default_file("{distributed_type: NO, num_machines: 1, machine_rank: 0, num_processes: 2, main_process_ip: old}")
    result = plan("--cpu")
    assert numbers(result) == (2, 1) and result.rendezvous.host == "n1"
    assert any("main_process_ip is 'n1' (from Slurm), not 'old'" in note for note in result.notes)


def test_each_task_of_a_scheduler_is_a_process(plan, srun):
    srun(3, 1, "2,2")
    result = plan("--cpu --tee 3")
    assert result.runner == "single" and result.num_processes == 4 and result.notes == (), "the first task prints them"
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert dict(result.extra) == {**ranks, "MASTER_ADDR": "n1", "MASTER_PORT": "20007"}
    assert result["num_cpu_threads_per_process"] == 4, "two tasks share the 8 cores"
    with pytest.raises(LaunchError, match="Slurm has started 4 tasks"):
        plan("--cpu --num_processes 8")
    assert plan("--cpu --num_processes 4").num_processes == 4
    srun(0, 0, "2,2")
    notes = plan("--cpu --tee 3").notes
    assert any("OMP_NUM_THREADS" in note for note in notes) and any("--tee has no effect" in note for note in notes)


def test_where_tasks_meet(plan, srun):
    srun(1, 0, "2")
    assert plan("--cpu").extra["MASTER_ADDR"] == "127.0.0.1"
    srun(1, 0, "2,2", SLURM_DISTRIBUTION="arbitrary")
    with pytest.raises(LaunchError, match="Give --main_process_ip"):
        plan("--cpu")
    assert plan("--cpu --main_process_ip a").extra["MASTER_ADDR"] == "a"


def test_a_launch_that_leaves_the_tasks_joins_none_of_them(plan, srun):
    srun(1, 0, "2")
    result = plan("--cpu --num_machines 2 --num_processes 2 --machine_rank 0 --main_process_ip a")
    assert numbers(result) == (2, 0) and dict(result.extra) == {}
    for node, tasks_per_node in ((0, "2,2"), (1, "1,1")):
        srun(1, node, tasks_per_node)
        result = plan("--cpu --num_machines 1")
        assert result.runner == "single" and dict(result.extra) == {"RANK": "0", "WORLD_SIZE": "1"}
