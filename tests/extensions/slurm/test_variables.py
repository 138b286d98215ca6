import pytest

from accelerate.extensions.slurm import variables as slurm
from accelerate.runtime import ranks


def slurm_variables(text):
    return dict(f"SLURM_{pair}".split("=") for pair in text.split())


# As srun of Slurm 22.05 writes them (`srun -N2 -n5`), less what is not read here.
STEP = slurm_variables(
    "GTIDS=4 JOB_ID=2 JOB_NODELIST=n[1-2] JOB_NUM_NODES=2 LOCALID=0 NNODES=2 NODEID=1 NTASKS=5 PROCID=4 STEP_ID=0 "
    "STEP_NODELIST=n[1-2] STEP_NUM_NODES=2 STEP_NUM_TASKS=5 STEP_TASKS_PER_NODE=4,1"
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a1,a2", ["a1", "a2"]),
        ("gpu[03-05,09],login1", ["gpu03", "gpu04", "gpu05", "gpu09", "login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("1-2", ["1-2"]),
    ],
)
def test_lists_of_nodes(text, names):
    assert list(slurm.hosts(text)) == names


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[]", "n[1,,2]", "a,,b", "", ","])
def test_malformed_lists_of_nodes_name_the_variable(text):
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST is .*no list of nodes"):
        slurm.hosts(text, "SLURM_STEP_NODELIST")


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("4(x2),3", [4, 4, 3]), ("1(x3)", [1, 1, 1]), ("1(x99999999999),5", [1] * 9)]
)
def test_tasks_of_each_node(text, counts):
    assert [slurm.tasks_on(text, node) for node in range(len(counts))] == counts


@pytest.mark.parametrize("number", ["4294967290", "4294967291", "4294967292", "", "batch", "x"])
def test_special_steps_are_no_steps(number):
    assert slurm.step({**STEP, "SLURM_STEP_ID": number}) is None


def test_a_batch_script_that_was_submitted_from_a_step_inherits_its_variables():
    # Seen with `srun -n2 bash -c 'sbatch -n2 job.sh'`: all of SLURM_STEP_* is the outer step's, SLURM_GTIDS is not.
    outer = {**STEP, **slurm_variables("STEP_TASKS_PER_NODE=2 STEP_NUM_TASKS=2 PROCID=0 NODEID=0")}
    assert slurm.step({**outer, "SLURM_GTIDS": "0"}) is None
    assert slurm.step({**outer, "SLURM_GTIDS": "0,1"}).local_size == 2
    unset = {**STEP, "SLURM_GTIDS": ""}  # some users unset it
    assert slurm.step(unset).local_size == 1
    assert slurm.step({**unset, "SLURM_JOB_NUM_NODES": "1"}) is None, "the other job has fewer nodes than the step"
    uncounted = {**outer, "SLURM_GTIDS": "0,1", "SLURM_STEP_NUM_NODES": "", "SLURM_NNODES": ""}
    assert slurm.step(uncounted).nodes == 2
    assert ranks.resolve({**outer, "SLURM_GTIDS": "0"}) is None


def test_the_shell_of_srun_pty_is_alone_and_steps_started_from_it_are_not(monkeypatch):
    terminal = {**STEP, "SLURM_PTY_PORT": "34863"}
    monkeypatch.setattr(slurm, "_has_terminal", lambda: True)
    assert slurm.step(terminal) is None and ranks.resolve(terminal) is None
    monkeypatch.setattr(slurm, "_has_terminal", lambda: False)
    assert slurm.step(terminal) is not None


# `srun --het-group=0,1` of a job whose first component is node n2 with one task, and whose second is n1 with two: the list is
# sorted by name, and so are the counts; the numbers are not.
HETEROGENEOUS = STEP | slurm_variables(
    "GTIDS=0 HET_SIZE=2 JOB_NODELIST_HET_GROUP_0=n2 JOB_NODELIST_HET_GROUP_1=n1 NODEID=0 NTASKS=3 PROCID=0 "
    "STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=2,1"
)


def test_heterogeneous_steps():
    assert slurm.step(HETEROGENEOUS).local_size == 1
    assert slurm.first_node(HETEROGENEOUS) == "n2"
    assert slurm.first_node({**HETEROGENEOUS, "SLURM_STEP_NODELIST": "n1"}) == "n1"


def test_ports_differ_between_steps_and_are_never_handed_out_by_the_system():
    first = slurm.port({"SLURM_JOB_ID": "123"})
    assert first == 20123 != slurm.port({"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "1"})
    assert all(20000 <= slurm.port({"SLURM_JOB_ID": str(job)}) < 32768 for job in (0, 12767, 12768, 10**12))
    assert slurm.port({}) is None


def test_srun_with_pmi_tells_the_local_rank_in_its_own_words():
    # `srun --mpi=pmi2 -n2`: PMI_RANK without MPI_LOCALRANKID.
    pmi = {**STEP, "PMI_RANK": "4", "PMI_SIZE": "5", "PMI_JOBID": "3.0"}
    assert ranks.resolve(pmi) == ranks.Ranks(4, 5, 0, 1, "Slurm")
    # Hydra under Slurm: its helpers are the tasks of the step, its processes are not.
    hydra = {**STEP, "PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert ranks.resolve(hydra) == ranks.Ranks(2, 3, 0, 1, "MPI")
