"""Functions run in real processes: what they see, how they end, and what is reported; also in a real Jupyter kernel."""

import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from accelerate.utils.other import get_free_port
from distributed.conftest import LIMIT_S, SCRIPTS, begun, done, gone

SCRIPT = SCRIPTS / "notebook_functions.py"


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Where processes write things down; call it for all of them."""
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv("NOTES", str(folder))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return lambda: [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.fixture
def begin(notes, tmp_path):
    """Begin to run a function of the script in a separate program; it is gone at the end."""
    running = []

    def run(name, keywords=None, **options):
        command = [sys.executable, str(SCRIPT), name, *([] if keywords is None else [repr(keywords)])]
        process = begun(command, cwd=tmp_path, start_new_session=True, **options)
        running.append(process)
        return process

    yield run
    for process in running:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


@pytest.fixture
def run(begin):
    """Run a function of the script to its end; return its output and its exit status."""

    def run(name, keywords=None):
        process = begin(name, keywords)
        out, err = process.communicate(timeout=LIMIT_S)
        return out + err, process.returncode

    return run


def test_two_processes_cooperate(run, notes):
    out, status = run("total", {"mixed_precision": "bf16"})
    assert status == 0, out
    first, second = notes()
    assert (first["size"], first["total"], second["total"]) == (2, 3, 3)
    assert {first["local"], second["local"]} == {0, 1}
    assert (first["precision"], first["forked"]) == ("bf16", True)


def test_forked_processes_train_after_this_one_has_used_its_threads(run, notes):
    out, status = run("train_in_a_used_process")
    assert status == 0, out
    assert [len(told["loss"]) for told in notes()] == [2, 2]


# What fails, and what the notebook's user reads.
FAILURES = {
    "fail_on_one": (
        "WorkerError: Rank 1 failed in fail_on_one:\n\nTraceback (most recent call last):\n",
        "KeyError: 'what went wrong'",
    ),
    "vanish_on_one": ("WorkerError: Rank 1 failed in vanish_on_one:", "was killed by SIGKILL"),
    "slip_away": ("Rank 1 failed", "ended with exit status 0, before its function was done"),
    "return_on_one": ("WorkerError: Rank 0 failed in return_on_one:",),
}


def test_failures_one_after_the_other(run):
    out, status = run(",".join(FAILURES), {})
    assert status == 1
    assert "notebook/processes" not in out
    parts = dict(part.split("\n", 1) for part in out.split("== ")[1:])
    for name, words in FAILURES.items():
        assert all(word in parts[name] for word in words), (name, out)


def processes_of(launcher):
    """Read the output up to where both ranks have said that they are up."""
    lines = iter(launcher.stdout.readline, "")
    ups = (line for line in lines if line.startswith("up "))
    return [psutil.Process(int(next(ups).split()[1])) for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "interrupts"),
    [("wait_in_python", 1), pytest.param("wait_in_torch", 2, marks=pytest.mark.slow), ("wait_and_ignore", 2)],
)
def test_an_interrupt_leaves_nobody(begin, name, interrupts):
    process = begin(name, {})
    processes = processes_of(process)
    process.send_signal(signal.SIGINT)
    for _ in range(interrupts - 1):
        while process.poll() is None:  # one that comes before the first was dealt with is the same one
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    gone(processes)
    if interrupts == 1:
        assert "interrupted True" in out, out + err


def test_a_launcher_that_is_killed_takes_its_processes_along(begin):
    process = begin("wait_in_torch", {})
    processes = processes_of(process)
    process.kill()
    gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_restart_together(begin, notes, backend):
    shared = {"num_nodes": 2, "use_port": str(get_free_port()), "rdzv_backend": backend, "max_restarts": 2}
    machines = [begin("fail_at_first", {"node_rank": rank, **shared}) for rank in (1, 0)]
    for machine in machines:
        out, err = machine.communicate(timeout=LIMIT_S)
        assert machine.returncode == 0, out + err
    assert [(note["attempt"], note["size"], note["total"]) for note in notes()] == [(1, 4, 10)] * 4
    assert sorted(note["local"] for note in notes()) == [0, 0, 1, 1]


class Kernel:
    """A real Jupyter kernel, and what comes back from its cells."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, text, interrupt_at=None, late=()):
        """Run a cell; return its output, and its error as the notebook shows it.

        A thread of the kernel's reads descriptors, which may come after the end: `late` is such a text, and how often it comes.
        """
        message = self.client.execute(textwrap.dedent(text))
        out, error = "", ""
        while True:
            received = self.client.get_iopub_msg(timeout=LIMIT_S)
            content = received["content"]
            if received["parent_header"].get("msg_id") != message:
                continue
            if received["msg_type"] == "stream":
                out += content["text"]
                if interrupt_at is not None and out.count(interrupt_at) == 2:
                    self.manager.interrupt_kernel()
                    interrupt_at = None
            elif received["msg_type"] == "error":
                error = "\n".join([content["ename"], *content["traceback"]])
            elif content.get("execution_state") == "idle":
                break
        while late and out.count(late[0]) < late[1]:
            out += self.client.get_iopub_msg(timeout=LIMIT_S)["content"].get("text", "")
        return out, error


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["reads descriptors", "reads streams"])
def kernel(notes, request):
    pytest.importorskip("ipykernel")
    start = pytest.importorskip("jupyter_client.manager").start_new_kernel
    # Kernels do not read descriptors where they see pytest; nor do those of some hosted notebooks.
    variables = {**os.environ, "IPYTHONDIR": os.environ["NOTES"] + "-ipython"}
    if request.param:
        variables.pop("PYTEST_CURRENT_TEST", None)
    manager, client = start(kernel_name="python3", env=variables)
    request.node.reads_descriptors = request.param
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_output_comes_to_the_cell(kernel, request):
    out, error = kernel.run(
        """
        import os, sys
        from accelerate import notebook_launcher
        def train():
            print("printed", "by", os.environ["RANK"])
            print("error", "by", os.environ["RANK"], file=sys.stderr)
            os.write(1, b"past Python\\n")
        notebook_launcher(train, num_processes=2)
    """,
        late=("past Python", 2 if request.node.reads_descriptors else 0),
    )
    assert not error
    # A notebook's stream sends each piece of a `print`, so those of two ranks may be mixed.
    assert sorted(re.findall("printed|error", out)) == ["error"] * 2 + ["printed"] * 2
    assert out.count("past Python") == (2 if request.node.reads_descriptors else 0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True], ids=["reads descriptors"], indirect=True)
def test_the_notebook_of_the_examples_runs(kernel, tmp_path):
    notebook = json.loads((Path(__file__).parents[3] / "examples" / "train.ipynb").read_text("utf-8"))
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
    said = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "stored without outputs"
            out, error = kernel.run("".join(cell["source"]))
            assert not error, error
            said = out or said
    promised = re.search(r"^Prints: (.+)$", "".join(notebook["cells"][0]["source"]), re.M)[1]
    assert said.strip().rpartition("\n")[2] == promised


@pytest.mark.parametrize("kernel", [True], ids=["reads descriptors"], indirect=True)
def test_an_error_comes_to_the_cell_as_the_traceback_of_the_process(kernel):
    _, error = kernel.run("""
        import os, time
        from accelerate import notebook_launcher
        def train(rate):
            if os.environ["RANK"] == "1":
                raise ValueError(f"rate is {rate}")
            time.sleep(600)
        notebook_launcher(train, (3,), num_processes=2)
    """)
    assert error.startswith("WorkerError\nWorkerError: Rank 1 failed in train:\n\nTraceback (most recent call last):")
    assert 'raise ValueError(f"rate is {rate}")' in error and error.endswith("ValueError: rate is 3")
    assert "launchers.py" not in error


@pytest.mark.parametrize("kernel", [True], ids=["reads descriptors"], indirect=True)
def test_an_interrupt_of_the_cell(kernel):
    _, error = kernel.run(
        """
        import os, time
        from accelerate import notebook_launcher
        def train():
            print("up", os.getpid(), flush=True)
            time.sleep(600)
        notebook_launcher(train, num_processes=2)
        """,
        interrupt_at="up",  # the pieces of two prints may be mixed
    )
    assert error.startswith("KeyboardInterrupt")
    out, error = kernel.run("import multiprocessing; print(multiprocessing.active_children())")
    assert (out, error) == ("[]\n", "")


FRESH = """
import os, sys
from accelerate.extensions.notebook import processes as notebook

if __name__ == "__main__":
    factor = 6
    request = notebook.Request(lambda value: print("rank", os.environ["RANK"], 1 // value * factor), ARGS)
    notebook.run(request, {**os.environ, "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}, 2, "spawn")
"""


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        ("(1,)", 0, ["rank 0 6", "rank 1 6"]),
        pytest.param("(0,)", 1, ["ZeroDivisionError", "Rank "], marks=pytest.mark.slow),
        ("(sys.modules.update(cloudpickle=None),)", 1, ["<lambda> cannot be sent", "Install cloudpickle"]),
    ],
)
def test_fresh_processes_get_a_function_of_the_program(tmp_path, args, status, words):
    pytest.importorskip("cloudpickle")
    (tmp_path / "cell.py").write_text(FRESH.replace("ARGS", args))
    command = [sys.executable, str(tmp_path / "cell.py")]
    ended = done(command)
    output = ended.stdout + ended.stderr
    assert ended.returncode == status and all(word in output for word in words), output
