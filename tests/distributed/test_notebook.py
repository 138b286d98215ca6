"""Functions run in real processes: what they see, how they end, and who is told; also in a real Jupyter kernel."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "notebook_functions.py"
LIMIT_S = 120


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
    """Begin to run a function of the script in a program of its own; it is gone at the end."""
    begun = []

    def run(name, keywords=None, **options):
        command = [sys.executable, str(SCRIPT), name, *([] if keywords is None else [repr(keywords)])]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **streams, **options)
        begun.append(process)
        return process

    yield run
    for process in begun:
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


@pytest.fixture
def port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_two_processes_cooperate(run, notes):
    out, status = run("total", {"mixed_precision": "bf16"})
    assert status == 0, out
    first, second = notes()
    assert (first["size"], first["total"], second["total"]) == (2, 3, 3)
    assert {first["local"], second["local"]} == {0, 1}
    assert (first["precision"], first["forked"]) == ("bf16", True)


def test_a_port_that_is_taken(run):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = sock.getsockname()[1]
        out, status = run("total", {"use_port": taken})
    assert status == 1
    assert f"MeetingError: use_port asks for port {taken}, which another program listens at" in out


def test_forked_processes_train_after_this_one_has_used_its_threads(run, notes):
    out, status = run("train_in_a_used_process")
    assert status == 0, out
    assert [len(told["loss"]) for told in notes()] == [2, 2]


def test_the_first_failure_comes_first_with_its_traceback(run):
    out, status = run("fail_on_one", {})
    assert status == 1
    assert "WorkerError: Rank 1 failed in fail_on_one:\n\nTraceback (most recent call last):\n" in out
    assert "KeyError: 'what went wrong'" in out
    assert "launch/notebook" not in out


def test_a_killed_process_is_named_with_its_signal(run):
    out, status = run("vanish_on_one", {})
    assert status == 1
    assert "WorkerError: Rank 1 failed in vanish_on_one:" in out and "was killed by SIGKILL" in out


def test_a_process_that_ends_without_a_word_holds_nobody_up(run):
    out, status = run("slip_away", {})
    assert status == 1
    assert "Rank 1 failed" in out and "ended with exit status 0, before its function was done" in out


def test_a_process_that_is_done_lets_the_others_notice(run):
    out, status = run("return_on_one", {})
    assert status == 1
    assert "WorkerError: Rank 0 failed in return_on_one:" in out


def pids_of(process):
    return [int(process.stdout.readline().split()[1]) for _ in range(2)]


def is_gone(pid):
    """Whether a process has ended; nobody may have asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def await_end(pids):
    end = time.monotonic() + LIMIT_S
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end, "processes were left behind"
        time.sleep(0.05)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize(("name", "interrupts"), [("wait_in_python", 1), ("wait_in_torch", 2), ("wait_and_ignore", 2)])
def test_an_interrupt_leaves_nobody(begin, name, interrupts):
    process = begin(name, {})
    assert "Launching training" in process.stdout.readline()
    pids = pids_of(process)
    process.send_signal(signal.SIGINT)
    for _ in range(interrupts - 1):
        while process.poll() is None:  # one that comes before the first was dealt with is the same one
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert all(map(is_gone, pids))
    if interrupts == 1:
        assert "interrupted True" in out, out + err


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_launcher_that_is_killed_takes_its_processes_along(begin):
    process = begin("wait_in_torch", {})
    process.stdout.readline()
    pids = pids_of(process)
    process.kill()
    await_end(pids)


def two_machines(begin, name, port, **keywords):
    """Run a function on two machines with two processes each, which are one; return output and status of each."""
    shared = {"num_nodes": 2, "use_port": str(port), **keywords}
    machines = [begin(name, {"node_rank": rank, **shared}) for rank in (1, 0)]
    ended = [(*machine.communicate(timeout=LIMIT_S), machine.returncode) for machine in machines]
    return [(out + err, status) for out, err, status in reversed(ended)]


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_two_machines(begin, notes, port, backend):
    for out, status in two_machines(begin, "total", port, rdzv_backend=backend):
        assert status == 0, out
    assert [(told["size"], told["total"]) for told in notes()] == [(4, 10)] * 4
    assert sorted(told["local"] for told in notes()) == [0, 0, 1, 1]


@pytest.mark.parametrize("backend", [pytest.param("static", marks=pytest.mark.slow), "c10d"])
def test_two_machines_restart_together(begin, notes, port, backend):
    for out, status in two_machines(begin, "fail_at_first", port, rdzv_backend=backend, max_restarts=2):
        assert status == 0, out
    assert notes() == [{"attempt": 1, "size": 4}] * 4


def test_a_machine_that_does_not_answer(run, port):
    out, status = run("total", {"num_nodes": 2, "node_rank": 1, "use_port": port, "rdzv_conf": {"timeout": 1}})
    assert status == 1
    assert "MeetingError" in out and f"in vain for machine 0 to answer at 127.0.0.1, port {port}" in out


class Kernel:
    """A real Jupyter kernel, and what comes back from its cells."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, text, interrupt_at=None, late=()):
        """Run a cell; return its output, and its error as the notebook shows it.

        Descriptors are read by a thread of the kernel's, whose output may come after the end: `late` is such a text, and how often it
        is waited for.
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


@pytest.fixture(params=[True, False], ids=["reads descriptors", "reads streams"])
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


def test_output_comes_to_the_cell_in_whole_lines(kernel, request):
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
    for line in ("printed by 0\n", "printed by 1\n", "error by 0\n", "error by 1\n"):
        assert line in out
    assert out.count("past Python") == (2 if request.node.reads_descriptors else 0)
    out, error = kernel.run('notebook_launcher(train, num_processes=2, log_line_prefix_template="[${rank}] ")')
    assert not error
    for rank in (0, 1):
        assert f"[{rank}] printed by {rank}\n" in out


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
        interrupt_at="up ",
    )
    assert error.startswith("KeyboardInterrupt")
    out, error = kernel.run("import multiprocessing; print(multiprocessing.active_children())")
    assert (out, error) == ("[]\n", "")


FRESH = """
import os, sys
from accelerate.launch import notebook

if __name__ == "__main__":
    factor = 6
    request = notebook.Request(lambda value: print("rank", os.environ["RANK"], 1 // value * factor), ARGS)
    notebook.run(request, {**os.environ, "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}, 2, "spawn")
"""


def test_fresh_processes_get_a_function_of_the_program(tmp_path):
    pytest.importorskip("cloudpickle")
    script = tmp_path / "cell.py"
    for args, status, words in (
        ("(1,)", 0, ["rank 0 6", "rank 1 6"]),
        ("(0,)", 1, ["ZeroDivisionError", "Rank "]),
        ("(sys.modules.update(cloudpickle=None),)", 1, ["<lambda> cannot be sent", "Install cloudpickle"]),
    ):
        script.write_text(FRESH.replace("ARGS", args))
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT_S)
        output = done.stdout + done.stderr
        assert done.returncode == status and all(word in output for word in words), output
