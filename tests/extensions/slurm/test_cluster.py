"""What schedulers say. "Seen" sets of variables were recorded from a real run; the others follow the scheduler's documentation."""

import pytest

from accelerate.extensions.slurm.cluster import address, find
from accelerate.runtime.ranks import Ranks
from cases import cases


def seen(text):
    return dict(word.split("=", 1) for word in text.split())


# Seen: Slurm 22.05, a step in a batch script, `srun --ntasks-per-node=1 -N2 -c 1`, its second task.
SRUN = seen("""
    SLURM_DISTRIBUTION=cyclic SLURM_GTIDS=1 SLURM_JOB_ID=5 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0
    SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=n[1-2] SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)
    SLURM_TASKS_PER_NODE=1(x2) SLURMD_NODENAME=n2
""")
# Seen: `srun -N2 -n5`, the last task, which has a node for itself.
TASKS = SRUN | seen("""
    SLURM_GTIDS=4 SLURM_JOB_ID=2 SLURM_NTASKS=5 SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=5
    SLURM_STEP_TASKS_PER_NODE=4,1 SLURM_TASKS_PER_NODE=4,1
""")
del TASKS["SLURM_DISTRIBUTION"]
# Seen: the batch script itself, `sbatch -N2 -n4`.
BATCH = seen("""
    SLURM_CPUS_ON_NODE=3 SLURM_GTIDS=0 SLURM_JOB_ID=5 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2
    SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NODELIST=n[1-2] SLURM_NTASKS=4 SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=3,1 SLURMD_NODENAME=n1
""")
# Seen: Open MPI 4.1, `mpirun -n 2`, less the directories.
MPIRUN = seen("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1
    OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_orte_hnp_uri=770048000.0;tcp://192.0.2.2:52545;tcp6://[fd00::2]:53277
    OMPI_MCA_orte_local_daemon_uri=770048000.0;tcp://192.0.2.2:52545;tcp6://[fd00::2]:53277
    OMPI_MCA_orte_num_nodes=1 PMIX_ID=770048001.1 PMIX_NAMESPACE=770048001 PMIX_RANK=1
""")
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
    return found.source, found.machines, found.machine_rank, found.address, found.task and found.task.rank


FIRST = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_GTIDS": "0", "SLURM_LOCALID": "0"}
AWAY = {"OMPI_MCA_orte_local_daemon_uri": "770048000.2;tcp://192.0.2.4:1000"}


# Seen: `srun --het-group=0,1`; the first component is n2 with one task, the second n1 with two.
HETEROGENEOUS = TASKS | seen("""
    SLURM_GTIDS=1,2 SLURM_HET_SIZE=2 SLURM_JOB_NODELIST_HET_GROUP_0=n2 SLURM_JOB_NODELIST_HET_GROUP_1=n1
    SLURM_JOB_NUM_NODES_HET_GROUP_0=1 SLURM_JOB_NUM_NODES_HET_GROUP_1=1 SLURM_NTASKS=3 SLURM_PROCID=2
    SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURMD_NODENAME=n1
""")
# One node with five tasks.
ONE_NODE = {**TASKS, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "5"}
ONE_NODE |= {"SLURM_GTIDS": "0,1,2,3,4", "SLURM_LOCALID": "4"}
# Open MPI 5 says where mpirun runs in the name of the run.
PRRTE = {name: value for name, value in mpirun(1, 2, 0, 1, 2).items() if not name.startswith("OMPI_MCA")}
PRRTE |= {"PMIX_NAMESPACE": "prterun-login-1-4711@1", "PMIX_HOSTNAME": "b"}
# jsrun is an Open MPI, and sets its variables as well.
JSRUN = {"LSB_JOBID": "17", **mpirun(7, 12, 1, 6, 2)}
JSRUN |= {name.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE"): value for name, value in JSRUN.items()}
JSRUN_ALONE = JSRUN | {
    f"JSM_NAMESPACE_{name}": value for name, value in seen("RANK=1 SIZE=2 LOCAL_RANK=0 LOCAL_SIZE=1").items()
}


@cases(
    "environ, machines, machine_rank, address, rank",
    # task 0 is not on the node that the list begins with
    ({**TASKS, "SLURM_PROCID": "0", "SLURM_GTIDS": "0"}, 2, 1, None, 0),
    # one task on each node is a machine; several are processes
    (SRUN, 2, 1, "n1", None),
    (TASKS, 2, 1, "n1", 4),
    (ONE_NODE, 1, 0, "127.0.0.1", 4),  # meets without the node's name
    # a heterogeneous step meets on the first component
    (HETEROGENEOUS, 2, 1, "n2", 2),
    # Seen: `srun -m arbitrary -w n2,n1`: task 0 runs on n2, and the list is sorted all the same
    ({**TASKS, "SLURM_DISTRIBUTION": "arbitrary"}, 2, 1, None, 4),
    # as many scripts do: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
    ({**SRUN, "MASTER_ADDR": "n1-ib", "MASTER_PORT": "6000"}, 2, 1, "n1-ib", None),
)
def test_srun(environ, machines, machine_rank, address, rank):
    found = find(environ)
    assert where(found) == ("Slurm", machines, machine_rank, address, rank)
    assert found.notes == ()


def test_what_else_srun_says():
    assert find(SRUN).port == 20005 and find({**SRUN, **FIRST}).port == 20005
    assert find({**SRUN, "MASTER_ADDR": "n1-ib", "MASTER_PORT": "6000"}).port == 6000
    assert find(TASKS).task == Ranks(4, 5, 0, 1, "Slurm") and find(ONE_NODE).task == Ranks(4, 5, 4, 5, "Slurm")
    assert find({**BATCH, "MASTER_ADDR": "n1"}).address is None


@cases(
    "environ",
    {},
    {**BATCH, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"},
    # one of many runs that share an allocation: `srun -N1 -n1 --exclusive accelerate launch ... &`
    {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"},
    {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
    {**MPIRUN, "RANK": "3", "WORLD_SIZE": "8"},
    {"WORLD_SIZE": "8"},  # exported manually, and no other rank speaks
    mpirun(0, 1, 0, 1, 1),
    {"PBS_JOBID": "1.server", "PBS_NODEFILE": "/dev/zero"},
)
def test_one_process_or_torchrun(environ):
    assert find(environ, "a") is None


@cases(
    "environ, hostname, expected",
    (MPIRUN, "a", ("Open MPI", 1, 0, "127.0.0.1", 1)),
    # one launch on each machine
    (mpirun(2, 3, 0, 1, 3, **AWAY), "c", ("Open MPI", 3, 2, "192.0.2.2", None)),
    # mpirun was started on a machine that takes no part
    (mpirun(0, 3, 0, 1, 3, **AWAY), "a", ("Open MPI", 3, 0, None, None)),
    # a lone launch next to machines with several is a task
    (mpirun(8, 9, 0, 1, 3), "c", ("Open MPI", 3, None, "192.0.2.2", 8)),
    (PRRTE, "b", ("Open MPI", 2, 1, "login-1", None)),
    # Seen: mpirun in `sbatch -N2 -n3`: its helpers are the tasks of a step; their variables are passed on
    ({**SRUN, **mpirun(2, 3, 0, 1, 2, **AWAY)}, "x", ("Open MPI", 2, None, "n1", 2)),
    (HYDRA, "a", ("MPI", 1, 0, "127.0.0.1", 1)),
    (hydra(1, 4, 1, 2), "a", ("MPI", 2, None, None, 1)),
    (hydra(3, 4, 0, 1), "a", ("MPI", 4, 3, None, None)),
    # Seen: mpiexec.hydra -n 3 in `sbatch -N2`, the process that is alone on its node: two nodes cannot have three machines
    ({**SRUN, **hydra(2, 3, 0, 1)}, "a", ("MPI", 2, None, "n1", 2)),
    (JSRUN, "h01n02", ("jsrun", 2, None, None, 7)),
    (JSRUN_ALONE, "h01n02", ("jsrun", 2, 1, None, None)),
)
def test_mpi(environ, hostname, expected):
    assert where(find(environ, hostname)) == expected


@cases(
    "environ, message",
    ({**SRUN, "SLURM_PROCID": "one"}, "SLURM_PROCID.*'one'"),
    ({**TASKS, "SLURM_PROCID": "9"}, "SLURM_PROCID is 9.*SLURM_NTASKS"),
    ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST.*'n\[1-'"),
    ({**TASKS, "SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE.*'x'"),
    ({**SRUN, "SLURM_JOB_ID": "abc"}, "SLURM_JOB_ID.*'abc'"),
    ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK is 2.*0 to 1"),
    ({**HYDRA, "WORLD_SIZE": "3"}, "WORLD_SIZE is 3 but PMI_SIZE is 2"),
)
def test_malformed_variables_are_named(environ, message):
    with pytest.raises(ValueError, match=message):
        find(environ, "a")


def test_tasks_meet_on_the_first_node():
    variables = {"SLURM_STEP_NODELIST": "gpu[03-05,09],login1", "SLURM_JOB_ID": "123"}
    assert address(variables, Ranks(1, 4, 0, 1, "Slurm")) == ("gpu03", 20123)
