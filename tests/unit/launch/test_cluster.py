"""What schedulers say. "Seen" sets of variables were recorded from a real run; the others follow the scheduler's documentation."""

import os
import subprocess
import sys

import pytest

from accelerate.launch.cluster import find
from accelerate.launch.errors import LaunchError
from accelerate.runtime import slurm
from accelerate.runtime.ranks import Ranks

# Seen: Slurm 22.05, a step in a batch script, `srun --ntasks-per-node=1 -N2 -c 1`, its second task.
SRUN = {
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GTIDS": "1",
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURMD_NODENAME": "n2",
}
# Seen: `srun -N2 -n5`, the last task, which has a node for itself.
TASKS = {
    **SRUN,
    "SLURM_GTIDS": "4",
    "SLURM_JOB_ID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "4,1",
    "SLURM_TASKS_PER_NODE": "4,1",
}
del TASKS["SLURM_CPUS_PER_TASK"], TASKS["SLURM_DISTRIBUTION"]
# Seen: the batch script itself, `sbatch -N2 -n4`.
BATCH = {
    "SLURM_CPUS_ON_NODE": "3",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURMD_NODENAME": "n1",
}
# Seen: the shell of salloc on the first node (LaunchParameters=use_interactive_step), `salloc -N2 -n4`.
INTERACTIVE = {
    **BATCH,
    "SLURM_PTY_PORT": "33541",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# Seen: Open MPI 4.1, `mpirun -n 2`, less the directories.
MPIRUN = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "770048000.0;tcp://192.0.2.2:52545;tcp6://[fd00::2]:53277",
    "OMPI_MCA_orte_local_daemon_uri": "770048000.0;tcp://192.0.2.2:52545;tcp6://[fd00::2]:53277",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_ID": "770048001.1",
    "PMIX_NAMESPACE": "770048001",
    "PMIX_RANK": "1",
}
# Seen: MPICH 4.0, `mpiexec.hydra -n 2`.
HYDRA = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2"}


def mpirun(rank, size, local_rank, local_size, nodes, **more):
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    names = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}
    return {**MPIRUN, **names, "OMPI_MCA_orte_num_nodes": str(nodes), **more}


def hydra(rank, size, local_rank, local_size, **more):
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return {**dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True)), **more}


def where(found):
    return found.source, found.machines, found.machine_rank, found.address


# Slurm


def test_one_task_on_each_node_is_a_machine():
    found = find(SRUN)
    assert where(found) == ("Slurm", 2, 1, "n1") and found.task is None
    assert (found.port, found.cpus_per_task, found.notes) == (20005, 1, ())
    assert found.detail == "SLURM_STEP_NUM_NODES, SLURM_NNODES, SLURM_NODEID"
    first = find({**SRUN, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_GTIDS": "0", "SLURMD_NODENAME": "n1"})
    assert (first.machine_rank, first.address, first.port) == (0, "n1", 20005)


def test_several_tasks_on_a_node_are_processes():
    found = find(TASKS)
    assert where(found) == ("Slurm", 2, 1, "n1")
    assert found.task == Ranks(4, 5, 0, 1, "Slurm")


def test_several_tasks_of_one_node_meet_without_its_name():
    one = {**TASKS, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "5"}
    found = find({**one, "SLURM_GTIDS": "0,1,2,3,4", "SLURM_LOCALID": "4"})
    assert where(found) == ("Slurm", 1, 0, "127.0.0.1") and found.task == Ranks(4, 5, 4, 5, "Slurm")


@pytest.mark.parametrize("environ", [BATCH, INTERACTIVE], ids=["batch", "salloc"])
def test_without_srun_a_launch_uses_one_node_and_says_so(environ):
    found = find(environ)
    assert (found.machines, found.machine_rank, found.task, found.address) == (1, 0, None, None)
    assert "the allocation has 2 nodes and this launch uses one" in found.notes[0].replace(", and", " and")
    assert "srun --ntasks-per-node=1 accelerate launch" in found.notes[0]


def test_the_terminal_of_a_step_does_not_wait_for_the_other_tasks(monkeypatch):
    # Seen: `srun -n4 --pty bash`; the other three have ended at once.
    shell = {**TASKS, "SLURM_PTY_PORT": "34863", "SLURM_JOB_NUM_NODES": "1"}
    monkeypatch.setattr(slurm, "_has_terminal", lambda: True)
    found = find(shell)
    assert (found.machines, found.task) == (1, None) and "the terminal of an srun with 5 tasks" in found.notes[0]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**BATCH, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"},
        # one of many runs that share an allocation: `srun -N1 -n1 --exclusive accelerate launch ... &`
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"},
        {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {**TASKS, "RANK": "3", "WORLD_SIZE": "8"},
        {**MPIRUN, "RANK": "3", "WORLD_SIZE": "8"},
        {"WORLD_SIZE": "8"},  # exported by hand, and nobody else speaks
        mpirun(0, 1, 0, 1, 1),
        {"PBS_JOBID": "1.server"},
        {"LSB_JOBID": "7", "LSB_HOSTS": "a a a a"},
    ],
)
def test_one_process_or_torchrun(environ):
    assert find(environ, "a") is None


# Seen: `srun --het-group=0,1`; the first component is n2 with one task, the second n1 with two.
HETEROGENEOUS = {
    **TASKS,
    "SLURM_GTIDS": "1,2",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "n1",
}


def test_a_heterogeneous_step_meets_on_the_first_component():
    found = find(HETEROGENEOUS)
    assert where(found) == ("Slurm", 2, 1, "n2") and found.task == Ranks(2, 3, 1, 2, "Slurm")
    first = {
        "SLURM_GTIDS": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": "n2",
    }
    found = find({**HETEROGENEOUS, **first})
    assert found.address == "n2" and found.task == Ranks(0, 3, 0, 1, "Slurm")


def test_a_heterogeneous_batch_script_counts_the_nodes_of_all_components():
    components = {name: value for name, value in HETEROGENEOUS.items() if "HET" in name}
    found = find({**BATCH, **components, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"})
    assert "the allocation has 2 nodes" in found.notes[0]


def test_tasks_that_are_placed_by_hand_need_an_address():
    # Seen: `srun -m arbitrary -w n2,n1`: task 0 runs on n2, and the list is sorted all the same.
    found = find({**TASKS, "SLURM_DISTRIBUTION": "arbitrary"})
    assert found.address is None and "--distribution=arbitrary" in found.no_address


def test_a_first_task_on_another_node_than_the_first_says_so():
    found = find({**TASKS, "SLURM_PROCID": "0", "SLURM_GTIDS": "0"})
    assert found.address is None and found.notes == ()
    assert found.no_address == "This launch has number 0 and runs on n2, but SLURM_STEP_NODELIST begins with n1."


def test_a_meeting_point_by_hand():
    # As many scripts do: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
    found = find({**SRUN, "MASTER_ADDR": "n1-ib", "MASTER_PORT": "6000"})
    assert (found.address, found.port) == ("n1-ib", 6000) and "MASTER_ADDR, MASTER_PORT" in found.detail
    found = find({**TASKS, "SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "n2"})
    assert (found.address, found.port, found.no_address) == ("n2", 20002, "")
    assert find({**BATCH, "MASTER_ADDR": "n1"}).address is None
    with pytest.raises(LaunchError, match="MASTER_PORT is 0"):
        find({**SRUN, "MASTER_PORT": "0"})


# MPI


def test_mpirun_on_one_machine():
    found = find(MPIRUN)
    assert where(found) == ("Open MPI", 1, 0, "127.0.0.1") and found.task == Ranks(1, 2, 1, 2, "Open MPI")
    assert found.port == find({**MPIRUN, "PMIX_RANK": "0", "PMIX_ID": "770048001.0"}).port
    assert 20000 <= found.port < 32768


def test_mpirun_with_one_launch_on_each_machine():
    away = {"OMPI_MCA_orte_local_daemon_uri": "770048000.2;tcp://192.0.2.4:1000"}
    found = find(mpirun(2, 3, 0, 1, 3, **away), "c")
    assert where(found) == ("Open MPI", 3, 2, "192.0.2.2") and found.task is None
    assert "OMPI_MCA_orte_hnp_uri" in found.detail
    assert where(find(mpirun(0, 3, 0, 1, 3), "a")) == ("Open MPI", 3, 0, "192.0.2.2")
    # mpirun was started on a machine that takes no part
    first = find(mpirun(0, 3, 0, 1, 3, **away), "a")
    assert first.address is None
    assert first.no_address == "This launch has number 0 and runs on a, but mpirun runs on 192.0.2.2."


def test_a_lone_launch_beside_machines_with_several_is_a_task():
    found = find(mpirun(8, 9, 0, 1, 3), "c")
    assert (found.machines, found.task) == (3, Ranks(8, 9, 0, 1, "Open MPI"))


def test_mpirun_of_open_mpi_5_tells_where_it_runs_in_its_name():
    names = {name: value for name, value in mpirun(1, 2, 0, 1, 2).items() if not name.startswith("OMPI_MCA")}
    names |= {"PMIX_NAMESPACE": "prterun-login-1-4711@1", "PMIX_HOSTNAME": "b"}
    found = find(names)
    assert where(found) == ("Open MPI", 2, 1, "login-1")
    first = {**names, "OMPI_COMM_WORLD_RANK": "0"}
    assert find({**first, "PMIX_HOSTNAME": "login-1.site"}).address == "login-1"
    assert find(first).address is None


def test_mpirun_in_an_allocation_meets_on_its_first_node():
    # Seen: mpirun in `sbatch -N2 -n3`: its helpers are the tasks of a step; their variables are passed on.
    helper = {name: value for name, value in SRUN.items() if name.startswith("SLURM")}
    away = {"OMPI_MCA_orte_local_daemon_uri": "770048000.2;tcp://192.0.2.4:1000"}
    found = find({**helper, **mpirun(2, 3, 0, 1, 2, **away)})
    assert where(found) == ("Open MPI", 2, None, "n1") and found.task == Ranks(2, 3, 0, 1, "Open MPI")
    found = find({**helper, **mpirun(0, 3, 0, 2, 2), "SLURMD_NODENAME": "n2"})
    assert found.address is None and "SLURM_JOB_NODELIST begins with n1" in found.no_address


def test_hydra():
    assert where(find(HYDRA)) == ("MPI", 1, 0, "127.0.0.1") and find(HYDRA).task == Ranks(1, 2, 1, 2, "MPI")
    found = find(hydra(1, 4, 1, 2))
    assert where(found) == ("MPI", 2, None, None) and found.task == Ranks(1, 4, 1, 2, "MPI")
    assert where(find(hydra(3, 4, 0, 1))) == ("MPI", 4, 3, None)
    # Seen: mpiexec.hydra -n 3 in `sbatch -N2`, the process that is alone on its node: two nodes cannot have three machines.
    found = find({**SRUN, **hydra(2, 3, 0, 1)})
    assert found.task == Ranks(2, 3, 0, 1, "MPI") and found.address == "n1"


def test_a_world_size_by_hand_must_agree():
    assert find({**HYDRA, "WORLD_SIZE": "2"}).task.world_size == 2
    with pytest.raises(LaunchError, match="WORLD_SIZE is 3 but PMI_SIZE is 2"):
        find({**HYDRA, "WORLD_SIZE": "3"})


def test_srun_with_pmi_is_srun():
    # Seen: `srun -n2 --mpi=pmi2`.
    assert find({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "3.0"}).source == "Slurm"


# PBS


@pytest.fixture
def pbs(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("a.site\na.site\nb.site\nb.site\n\nc.site\n")
    return {"PBS_JOBID": "123[4].server", "PBS_NODEFILE": str(file), "PBS_ENVIRONMENT": "PBS_BATCH"}


def test_the_hosts_of_pbs_are_numbered_as_in_its_file(pbs):
    found = find(pbs, "c")
    assert where(found) == ("PBS", 3, 2, "a.site") and found.task is None
    assert found.port == find(pbs, "b.site").port != find({**pbs, "PBS_JOBID": "123[5].server"}, "b").port
    assert "PBS_NODEFILE" in found.detail
    assert where(find({**pbs, "PBS_TASKNUM": "2"}, "A.site")) == ("PBS", 3, 0, "a.site")  # pbsdsh
    by_ssh = {name: value for name, value in pbs.items() if name != "PBS_ENVIRONMENT"}
    assert where(find(by_ssh, "a")) == ("PBS", 3, 0, "a.site")


@pytest.mark.parametrize("task", [{}, {"PBS_TASKNUM": "1", "PBS_NODENUM": "0"}])
def test_the_script_of_a_pbs_job_uses_one_host_and_says_so(pbs, task):
    found = find({**pbs, **task}, "a")
    assert (found.machines, found.task) == (1, None)
    assert "the job has 3 hosts" in found.notes[0] and "pbsdsh" in found.notes[0]


def test_a_host_with_another_name(pbs):
    assert find({**pbs, "PBS_NODENUM": "1"}, "ib-b").machine_rank == 1
    found = find(pbs, "other")
    assert found.machines == 1 and "other is none of them" in found.notes[0]
    # the same short name in another domain is another machine
    assert find(pbs, "b.elsewhere").machines == 1


def test_several_launches_of_pbsdsh_on_a_host_are_refused(pbs):
    with pytest.raises(LaunchError, match=r"PBS_VNODENUM is 3.*pbsdsh -u"):
        find({**pbs, "PBS_VNODENUM": "3", "PBS_TASKNUM": "4"}, "b")
    assert find({**pbs, "PBS_VNODENUM": "2", "PBS_TASKNUM": "3"}, "b").machine_rank == 1


def test_a_file_of_hosts_that_is_not_there(pbs, tmp_path):
    gone = {**pbs, "PBS_NODEFILE": str(tmp_path / "none")}
    assert find(gone, "a") is None
    with pytest.raises(LaunchError, match="PBS_NODEFILE is .*cannot be read.*PBS_NODENUM is 1"):
        find({**gone, "PBS_NODENUM": "1"}, "b")
    assert find({**pbs, "PBS_NODEFILE": str(tmp_path)}, "a") is None
    assert find({**pbs, "PBS_NODEFILE": "a\0b"}, "a") is None


def test_mpiexec_in_a_pbs_job_meets_on_its_first_host(pbs):
    found = find({**pbs, **hydra(4, 5, 0, 1)}, "c")
    assert where(found) == ("MPI", 3, None, "a.site") and found.task.rank == 4
    assert find({**pbs, **hydra(0, 5, 0, 2)}, "b").address is None


# LSF


@pytest.mark.parametrize(
    "hosts", [{"LSB_MCPU_HOSTS": "a 4 b 4"}, {"LSB_HOSTS": "a a a a b b b b"}, {"LSB_DJOB_HOSTFILE": None}]
)
def test_hosts_of_lsf(hosts, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a\na\nb\nb\n")
    environ = {"LSB_JOBID": "17", **{name: value or str(file) for name, value in hosts.items()}}
    assert where(find(environ, "b")) == ("LSF", 2, 1, "a")
    assert where(find({**environ, "LSF_PM_TASKID": "1"}, "a")) == ("LSF", 2, 0, "a")
    found = find(environ, "a")
    assert found.machines == 1 and "blaunch" in found.notes[0]
    with pytest.raises(LaunchError, match="LSF_PM_TASKID is 3 and the job has 2 hosts"):
        find({**environ, "LSF_PM_TASKID": "3"}, "b")


def test_array_jobs_of_lsf_do_not_share_a_port():
    environ = {"LSB_JOBID": "17", "LSB_MCPU_HOSTS": "a 1 b 1"}
    assert find({**environ, "LSB_JOBINDEX": "1"}, "b").port != find({**environ, "LSB_JOBINDEX": "2"}, "b").port


def test_jsrun_leaves_out_the_node_that_it_runs_on():
    numbers = {"RANK": "7", "SIZE": "12", "LOCAL_RANK": "1", "LOCAL_SIZE": "6"}
    tasks = {f"JSM_NAMESPACE_{name}": value for name, value in numbers.items()}
    # jsrun is an Open MPI, and sets its variables as well.
    tasks |= {f"OMPI_COMM_WORLD_{name}": value for name, value in numbers.items()}
    environ = {"LSB_JOBID": "17", "LSB_MCPU_HOSTS": "batch5 1 h01n01 42 h01n02 42", **tasks}
    found = find(environ, "h01n02")
    assert where(found) == ("jsrun", 2, None, "h01n01") and found.task == Ranks(7, 12, 1, 6, "jsrun")
    whole = find({**environ, "LSB_MCPU_HOSTS": "h01n01 42 h01n02 42"}, "h01n02")
    assert whole.address == "h01n01"
    one_each = {name: {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}[name] for name in numbers}
    found = find({**environ, **{f"JSM_NAMESPACE_{name}": value for name, value in one_each.items()}}, "h01n02")
    assert where(found) == ("jsrun", 2, 1, "h01n01") and found.task is None


# Malformed and hostile


@pytest.mark.parametrize(
    ("environ", "fragments"),
    [
        ({**SRUN, "SLURM_PROCID": "one"}, ("SLURM_PROCID", "'one'")),
        ({**TASKS, "SLURM_PROCID": "9"}, ("SLURM_PROCID is 9", "SLURM_NTASKS")),
        ({**SRUN, "SLURM_NODEID": "7", "SLURM_STEP_TASKS_PER_NODE": ""}, ("SLURM_NODEID is 7", "is 2")),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, ("SLURM_STEP_NODELIST", "'n[1-'")),
        ({**TASKS, "SLURM_STEP_TASKS_PER_NODE": "x"}, ("SLURM_STEP_TASKS_PER_NODE", "'x'")),
        ({**SRUN, "SLURM_JOB_ID": "abc"}, ("SLURM_JOB_ID", "'abc'")),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "many"}, ("OMPI_COMM_WORLD_SIZE", "'many'")),
        ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "2"}, ("OMPI_COMM_WORLD_RANK is 2", "0 to 1")),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 1 b"}, ("LSB_MCPU_HOSTS", "'a 1 b'")),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a x b 2"}, ("LSB_MCPU_HOSTS",)),
    ],
)
def test_malformed_variables_are_named(environ, fragments):
    with pytest.raises(LaunchError) as caught:
        find(environ, "a")
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {**SRUN, "SLURM_STEP_NODELIST": "[1-999999999]", "SLURMD_NODENAME": ""},
        {**SRUN, "SLURM_HET_SIZE": "999999999", "SLURM_JOB_NODELIST_HET_GROUP_0": "[1-999999999]"},
        {**TASKS, "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"},
        {**BATCH, "SLURM_HET_SIZE": "999999999", "SLURM_JOB_NODELIST": "[1-999999999]"},
        {**mpirun(2, 3, 0, 1, 2), **BATCH, "SLURM_JOB_NODELIST": "[1-999999999]"},
        mpirun(999999998, 999999999, 0, 1, 999999999),
        {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 9999999 b 9999999"},
    ],
)
def test_hostile_variables_cost_neither_memory_nor_time(environ):
    found = find(environ, "b")
    assert found is not None and len(repr(found)) < 2000


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
def test_a_hostile_file_of_hosts_is_refused():
    # A device without an end, and one of nothing.
    with pytest.raises(LaunchError, match="no list of hosts"):
        find({"PBS_JOBID": "1", "PBS_NODEFILE": "/dev/zero"}, "a")
    assert find({"PBS_JOBID": "1", "PBS_NODEFILE": "/dev/null"}, "a") is None


def test_asking_loads_no_torch():
    program = f"import sys; from accelerate.launch.cluster import find; find({TASKS!r}); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60).strip() == "False"
