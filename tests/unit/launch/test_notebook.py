"""What a launcher of functions refuses, which process used a device first, and what the errors of a run become."""

import functools
import json
import logging
import os
import pickle
import signal
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch import elastic, errors, notebook
from accelerate.launch.errors import LaunchError, RunError
from accelerate.launch.machine_rendezvous import FailedElsewhere
from accelerate.launch.notebook import MeetingError, Request, WorkerError, check
from accelerate.runtime import failure, storage


def train(rate, steps=1):
    pass


async def train_later():
    pass


def train_bit_by_bit():
    yield


class Callable:
    def __call__(self, rate):
        pass


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (train, [1, 2]),
        (functools.partial(train, 1), ()),
        (Callable(), (1,)),
        (print, ("a", "b")),
        (lambda: None, ()),
        (dict, ()),
    ],
)
def test_what_is_fine(function, args):
    check(Request(function, args))


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "function is None, which cannot be called. Pass the function itself", {"function": None}),
        (TypeError, "function is 'train', which cannot be called", {"function": "train"}),
        (TypeError, "function is train_later, a coroutine function", {"function": train_later, "args": ()}),
        (TypeError, "function is train_bit_by_bit, a generator", {"function": train_bit_by_bit, "args": ()}),
        (TypeError, "is train_later, a coroutine", {"function": functools.partial(train_later), "args": ()}),
        (TypeError, r"args is 5; give a tuple of the function's arguments, as in args=\(5,\)", {"args": 5}),
        (TypeError, "args is 'ab'; give a tuple", {"args": "ab"}),
        (TypeError, r"args is 'x{56}\.\.\.; give", {"args": "x" * 10_000}),
        (TypeError, "args is {'rate': 1}; give a tuple", {"args": {"rate": 1}}),
        (TypeError, r"args is \(\), which does not fit train\(rate, steps=1\): missing a required", {"args": ()}),
        (TypeError, r"args is \(\), which does not fit Callable\(rate\)", {"function": Callable(), "args": ()}),
        (TypeError, r"does not fit train\(rate, steps=1\): too many positional", {"args": (1, 2, 3)}),
        (ValueError, "num_processes is 0; it must be at least 1", {"num_processes": 0}),
        (TypeError, "num_processes is '2'; give an integer", {"num_processes": "2"}),
        (TypeError, "num_processes is True", {"num_processes": True}),
        (ValueError, "mixed_precision is 'fp17'; choose one of no, fp16, bf16, fp8", {"mixed_precision": "fp17"}),
        (ValueError, "mixed_precision is None; choose one of no, fp16, bf16, fp8", {"mixed_precision": None}),
        (ValueError, "num_nodes is 0", {"num_nodes": 0}),
        (ValueError, "node_rank is -1", {"node_rank": -1}),
        (ValueError, "node_rank is 2, and num_nodes is 2: machines are numbered", {"node_rank": 2, "num_nodes": 2}),
        (ValueError, "node_rank is 1, and num_nodes is 1", {"node_rank": 1}),
        (ValueError, "max_restarts is -1", {"max_restarts": -1}),
        (ValueError, "monitor_interval is 0;", {"monitor_interval": 0}),
        (ValueError, "monitor_interval is 'x'", {"monitor_interval": "x"}),
        (ValueError, "use_port is 'abc'", {"use_port": "abc"}),
        (ValueError, "use_port is 65536", {"use_port": 65536}),
        (ValueError, "rdzv_backend is 'etcd'; choose one of static, c10d", {"rdzv_backend": "etcd"}),
        (TypeError, "rdzv_conf is 'timeout=1'; give a dictionary", {"rdzv_conf": "timeout=1"}),
        (ValueError, "rdzv_endpoint is 'there'; give host:port", {"rdzv_endpoint": "there"}),
        (ValueError, "rdzv_endpoint is ':1'; give host:port", {"rdzv_endpoint": ":1"}),
        (ValueError, "use_port is '0', and num_nodes is 2: several machines must", {"use_port": "0", "num_nodes": 2}),
    ],
)
def test_what_is_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        check(Request(**{"function": train, "args": (1,), **arguments}))


@pytest.mark.parametrize(
    ("port", "number"), [("29501", 29501), (29501, 29501), ("29500", 0), ("", 0), ("0", 0), (None, 0)]
)
def test_the_port_is_a_free_one_unless_the_user_has_chosen(port, number):
    assert Request(train, use_port=port).chosen_port == number


def test_where_machines_meet_and_for_how_long():
    assert Request(train, master_addr="a", use_port=3).endpoint == "a:3"
    assert Request(train, master_addr="a").endpoint == "a:29500"
    assert Request(train, master_addr="a", rdzv_endpoint="b:4").endpoint == "b:4"
    assert Request(train, rdzv_endpoint="127.0.0.1:29500").chosen_port == 29500
    assert Request(train).join_timeout == 600
    assert Request(train, rdzv_conf={"timeout": "5"}).join_timeout == 5
    assert Request(train, rdzv_conf={"join_timeout": 7, "timeout": 5}).join_timeout == 7


# -- the first use of a device -------------------------------------------------------------------------------------------


class Namespace:
    """A module such as `torch.cuda`, in which the first use calls what was left for it."""

    def __init__(self):
        self.used, self.later, self.spoiled = False, [], False

    def _lazy_call(self, function):
        self.later.append(function)

    def is_initialized(self):
        return self.used

    def _is_in_bad_fork(self):
        return self.spoiled


# A frame of torch's.
TORCH = {}
TEXT = (
    "def in_torch(namespace):\n    namespace.used = True\n    for function in namespace.later:\n        function()\n"
)
exec(compile(TEXT, os.path.join("site-packages", "torch", "cuda", "__init__.py"), "exec"), TORCH)
in_torch = TORCH["in_torch"]


@pytest.fixture
def namespace(monkeypatch):
    namespace = Namespace()
    monkeypatch.setattr(torch, "cuda", namespace)
    monkeypatch.setattr(notebook, "_stacks", {})
    monkeypatch.setattr(notebook, "_watched", set())
    return namespace


def library(path):
    """Return a module that uses the device in its second line."""
    module = types.ModuleType("greedy")
    exec(compile("def load(use):\n    use()\n", path, "exec"), vars(module))
    return module


def test_the_library_and_the_users_line_of_the_first_use_are_named(namespace):
    notebook.watch(("cuda",))
    greedy = library(os.path.join("elsewhere", "site-packages", "greedy", "core.py"))
    greedy.load(functools.partial(in_torch, namespace))
    in_torch(namespace)  # only the first use counts
    text = notebook.culprit("cuda")
    assert "first used by greedy/core.py, line 2, in load. That was called by" in text
    assert f"{__file__}, line" in text and "greedy.load(functools" in text


def test_the_users_own_line_is_named_once(namespace):
    notebook.watch(("cuda",))
    in_torch(namespace)
    text = notebook.culprit("cuda")
    assert "That was called" not in text and "in_torch(namespace)" in text


def test_a_cell_is_named_by_its_number(namespace, monkeypatch):
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(_filename_map={"ipykernel/1.py": 7}))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    notebook.watch(("cuda",))
    library("ipykernel/1.py").load(functools.partial(in_torch, namespace))
    assert "first used by cell In[7], line 2" in notebook.culprit("cuda")


def test_a_device_is_watched_once_and_only_before_its_first_use(namespace):
    notebook.watch(("cuda",))
    notebook.watch(("cuda", "xpu", "no_such_device"))
    assert len(namespace.later) == 1
    used = torch.cuda = Namespace()
    used.used = True
    notebook._watched.clear()
    notebook.watch(("cuda",))
    assert used.later == []


def test_torch_of_this_version_keeps_a_list_to_call():
    notebook.watch()
    names = [getattr(getattr(call, "func", None), "__module__", "") for call, _ in torch.cuda._queued_calls]
    assert notebook.__name__ in names


def test_a_fault_of_ours_does_not_take_the_device_away(namespace, monkeypatch):
    notebook.watch(("cuda",))
    monkeypatch.setattr(notebook.traceback, "walk_stack", lambda frame: [][1])
    in_torch(namespace)
    assert namespace.used


def test_what_happened_before_is_guessed(monkeypatch):
    main = types.ModuleType("__main__")
    main.weights, main.number, main.model = torch.ones(1, device="meta"), 3, torch.nn.Linear(1, 1, device="meta")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    text = notebook.culprit("meta")
    assert "import accelerate first" in text and "Variables that lie on it: weights, model." in text
    assert "bitsandbytes" in text


@pytest.mark.parametrize(
    ("used", "spoiled", "survives"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_whether_a_fork_would_work(namespace, used, spoiled, survives):
    device = types.SimpleNamespace(type="cuda", namespace=lambda: namespace)
    namespace.used, namespace.spoiled = used, spoiled
    assert (notebook.is_used(device), notebook.survives_fork(device)) == (used, survives)
    device.type = "cpu"
    assert notebook.survives_fork(device) and not notebook.is_used(device)


# -- a run ---------------------------------------------------------------------------------------------------------------


def work():
    pass


@pytest.fixture
def start(monkeypatch):
    """Let torch's launcher do something else; run a request on it."""

    def run(answer, method=notebook.FORK, **arguments):
        def instead(config, function, args, environment, **more):
            run.config, run.environment = config, environment
            return answer(config)

        monkeypatch.setattr(elastic, "start", instead)
        notebook.run(Request(work, **arguments), method, {"A": "1"}, 2)
        return run.config

    return run


def raising(error):
    def answer(config):
        raise error

    return answer


def test_what_the_user_asks_for_arrives(start):
    config = start(lambda config: None, max_restarts=3, monitor_interval=0.5)
    assert (config.min_nodes, config.nproc_per_node, config.max_restarts, config.monitor_interval) == (1, 2, 3, 0.5)
    assert (config.start_method, config.rdzv_configs["handler"].port, start.environment["A"]) == ("fork", 0, "1")
    assert config.run_id.startswith("accelerate-") and config.log_line_prefix_template is None
    c10d = {"rdzv_backend": "c10d", "use_port": 29501, "rdzv_id": "mine", "rdzv_conf": {"timeout": 7}}
    config = start(lambda config: None, log_line_prefix_template="[${rank}] ", **c10d)
    handler = config.rdzv_configs["handler"]
    assert (handler.port, handler.settings["timeout"], config.run_id) == (29501, 7, "mine")
    assert config.log_line_prefix_template == "[${rank}] "


@pytest.mark.parametrize(
    ("method", "reads", "prefix"), [("fork", False, None), ("spawn", True, None), ("spawn", False, "[rank ${rank}] ")]
)
def test_fresh_processes_of_a_notebook_are_read_from_files(start, monkeypatch, method, reads, prefix):
    stream = types.SimpleNamespace(write=lambda text: None, flush=lambda: None)  # a notebook's own
    if reads:
        stream.watch_fd_thread = object()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert start(lambda config: None, method).log_line_prefix_template == prefix
    assert start(lambda config: None, "spawn").log_line_prefix_template is None  # a console's


def test_a_taken_port(start):
    error = dist.DistNetworkError("The server socket has failed to listen. name: EADDRINUSE")
    with pytest.raises(MeetingError, match="use_port asks for port 29501, which another program listens at"):
        start(raising(error), use_port=29501)
    with pytest.raises(MeetingError, match="rdzv_endpoint asks for port 29502"):
        start(raising(error), rdzv_endpoint="127.0.0.1:29502")
    with pytest.raises(MeetingError, match="could not meet at 127.0.0.1, port any: The server"):
        start(raising(error))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RunError("Check --main_process_ip and --main_process_port;"),
            MeetingError,
            "Check master_addr and use_port;",
        ),
        (
            RunError("--rdzv_conf join_timeout=SECONDS waits"),
            MeetingError,
            r"rdzv_conf=\{'join_timeout': SECONDS\} wa",
        ),
        (LaunchError("--machine_rank is 1 twice"), LaunchError, "node_rank is 1 twice"),
        (FailedElsewhere("machine 1: rank 2 ended"), WorkerError, "machine 1: rank 2 ended"),
    ],
)
def test_errors_of_several_machines_speak_of_arguments(start, error, kind, message):
    with pytest.raises(kind, match=message):
        start(raising(error), num_nodes=2, use_port=29501)


def test_an_address_that_is_unknown_is_named(start):
    with pytest.raises(MeetingError, match=r"'no such host' cannot be looked up.*\(master_addr\)"):
        start(lambda config: None, num_nodes=2, master_addr="no such host")


def failed(exitcode):
    return ChildFailedError("work", {0: ProcessFailure(0, 7, exitcode, "nowhere")})


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (3, "The process 7 failed with exit status 3, and left no traceback"),
        (0, "The process 7 ended with exit status 0, before its function was done"),
        (-9, "killed by SIGKILL, and left no traceback.\n\nrank 0 was killed by SIGKILL: the launcher did not"),
        (-11, "was killed by SIGSEGV"),
        (-63, "killed by signal 63"),
    ],
)
def test_processes_without_a_traceback(start, exitcode, words):
    with pytest.raises(WorkerError, match="^Rank 0 failed in work:\n\nThe process 7 ") as caught:
        start(raising(failed(exitcode)), num_nodes=2)
    assert words in str(caught.value) and "Processes of other machines are reported there" in str(caught.value)
    assert (caught.value.exitcode, caught.value.rank, caught.value.traceback) == (exitcode, 0, None)


def test_a_failure_and_those_that_follow(start, tmp_path):
    def ended(rank, code, text, time):
        path = str(tmp_path / str(rank))
        if text:
            record = {"summary": text, "traceback": f"Traceback\n{text}\n", "time": time, "where": "a.py:1 in f"}
            (tmp_path / str(rank)).write_text(json.dumps({"message": "x", failure.OURS: record}))
        one = ProcessFailure(rank, 7, code, path)
        one.seen = errors.Seen(time, stopped=code == -15)
        return one

    poisoned = "RuntimeError: Cannot re-initialize CUDA in forked subprocess."
    ranks = {
        0: ended(0, 1, "RuntimeError: Connection closed by peer", 1.0),
        1: ended(1, 1, poisoned, 2.0),
        2: ended(2, 1, poisoned, 3.0),
        3: ended(3, -15, "", 2.0),
    }
    with pytest.raises(WorkerError) as caught:
        start(raising(ChildFailedError("work", ranks)))
    error = caught.value
    assert str(error) == (
        f"Rank 1 failed in work:\n\nTraceback\n{poisoned}\n\n"
        "The GPU was used before the processes were forked. Restart, and use it only inside the function.\n\n"
        "rank 2 failed with the same error.\n"
        "rank 0 failed because another rank had gone: RuntimeError: Connection closed by peer"
    )
    assert error._render_traceback_() == [f"WorkerError: {error}"]
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.failures) == (str(error), error.failures)
    assert [one.rank for one in error.failures] == [1, 2, 0]  # rank 3 was stopped
    assert (error.rank, error.exitcode, error.traceback) == (1, 1, f"Traceback\n{poisoned}\n")


def test_signals_and_a_run_that_has_saved_itself(start):
    with pytest.raises(SystemExit) as caught:
        start(raising(failed(PREEMPTED)))
    assert caught.value.code == PREEMPTED
    with pytest.raises(KeyboardInterrupt):
        start(raising(SignalException("x", signal.SIGINT)))
    with pytest.raises(SignalException):
        start(raising(SignalException("x", signal.SIGTERM)))


def test_a_handler_that_torch_leaves_and_its_words(start):
    before, logger = signal.getsignal(signal.SIGQUIT), logging.getLogger("torch.multiprocessing.spawn")

    def answer(config):
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        assert not logger.isEnabledFor(logging.WARNING)

    start(answer)
    assert signal.getsignal(signal.SIGQUIT) is before and logger.isEnabledFor(logging.WARNING)


def test_one_launch_at_a_time(start):
    seen = []

    def second():
        try:
            notebook.run(Request(work), notebook.FORK, {}, 1)
        except RuntimeError as error:
            seen.append(str(error))

    def answer(config):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    start(answer)
    assert "Another thread of this process is running a launcher" in seen[0]
    start(lambda config: None)


# -- TPUs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_xla(monkeypatch):
    """torch_xla 2.9 as seen from here: `spawn` runs one process after the other, in this process."""
    library = types.SimpleNamespace(calls=[], initialized=False, error=None)

    def spawn(function, args=(), nprocs=None, join=True, daemon=False, start_method="spawn"):
        library.calls.append((nprocs, start_method, os.environ.get("ACCELERATE_MIXED_PRECISION")))
        if library.error is not None:
            raise library.error
        for index in range(nprocs or 2):
            function(index, *args)

    root = types.ModuleType("torch_xla")
    root._XLAC = types.SimpleNamespace(_xla_runtime_is_initialized=lambda: library.initialized)
    runtime = types.ModuleType("torch_xla.runtime")
    runtime.local_process_count, runtime.addressable_device_count = (lambda: 2), (lambda: 1)
    starter = types.ModuleType("torch_xla.distributed.xla_multiprocessing")
    starter.spawn = spawn
    for module in (root, runtime, types.ModuleType("torch_xla.distributed"), starter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # The worker forgets what a fork brings along; here it runs in the tests' own process.
    for name in ("_forget_handlers", "_end_with_the_parent"):
        monkeypatch.setattr(f"accelerate.launch.notebook_worker.{name}", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    return library


def test_one_process_for_each_core_which_starts_without_a_state(torch_xla, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    storage.process.current["left"] = "behind"
    seen = []
    request = Request(lambda number: seen.append((number, dict(storage.process.current))), (5,), num_processes=2)
    notebook.run_on_tpu(request, {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert seen == [(5, {})] * 2 and torch_xla.calls == [(None, "fork", "bf16")]
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_one_core_is_used_from_here(torch_xla):
    state, seen = storage.process.current, []
    request = Request(lambda: seen.append(storage.process.current is state), num_processes=1)
    notebook.run_on_tpu(request, {})
    assert seen == [True] and torch_xla.calls[0][:2] == (1, "fork")


def test_the_number_must_be_that_of_the_cores(torch_xla):
    with pytest.raises(WorkerError, match="num_processes is 8, and torch_xla runs 2 on this machine"):
        notebook.run_on_tpu(Request(work, num_processes=8), {})


def test_a_failure_on_a_tpu_comes_with_its_traceback_and_its_rank(torch_xla):
    seen = []

    def train():
        if seen:
            raise KeyError("what went wrong")
        seen.append(1)

    with pytest.raises(WorkerError, match=r"(?s)^Rank 1 failed in train:.*in train.*KeyError: 'what went"):
        notebook.run_on_tpu(Request(train), {})


@pytest.mark.parametrize("in_use", [True, False])
def test_a_tpu_in_use_is_refused_and_torch_xlas_own_errors_pass(torch_xla, in_use):
    torch_xla.initialized, torch_xla.error = in_use, RuntimeError("no TPU")
    with pytest.raises(RuntimeError, match="uses the TPU already" if in_use else "^no TPU"):
        notebook.run_on_tpu(Request(print), {})
    assert len(torch_xla.calls) == (not in_use)
