"""TPUs: what torch_xla is asked to do, with a torch_xla that notes it down."""

import os
import sys
import types
from concurrent.futures.process import BrokenProcessPool

import pytest

from accelerate.launch.notebook import xla
from accelerate.launch.notebook.failures import WorkerError
from accelerate.launch.notebook.request import Request
from accelerate.runtime import storage


class TorchXla:
    """torch_xla 2.9 as seen from here: `spawn` runs one process after the other, in this process."""

    def __init__(self, cores=2):
        self.cores, self.calls, self.initialized, self.error = cores, [], False, None

    def spawn(self, function, args=(), nprocs=None, join=True, daemon=False, start_method="spawn"):
        self.calls.append(
            {"nprocs": nprocs, "start_method": start_method, "precision": os.environ.get("ACCELERATE_MIXED_PRECISION")}
        )
        if nprocs not in (None, 1):
            raise ValueError("Unsupported nprocs")
        if self.error is not None:
            raise self.error
        for index in range(nprocs or self.cores):
            function(index, *args)


@pytest.fixture
def torch_xla(monkeypatch):
    library = TorchXla()
    root = types.ModuleType("torch_xla")
    root._XLAC = types.SimpleNamespace(_xla_runtime_is_initialized=lambda: library.initialized)
    runtime = types.ModuleType("torch_xla.runtime")
    runtime.local_process_count, runtime.addressable_device_count = (lambda: library.cores), (lambda: 1)
    distributed = types.ModuleType("torch_xla.distributed")
    starter = types.ModuleType("torch_xla.distributed.xla_multiprocessing")
    starter.spawn = library.spawn
    for module in (root, runtime, distributed, starter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # The worker gets rid of what a fork brings along; here it runs in the tests' own process.
    monkeypatch.setattr("accelerate.launch.notebook.worker._forget_handlers", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    return library


def test_one_process_for_each_core(torch_xla, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    seen = []
    xla.run(Request(seen.append, (5,)), {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert seen == [5, 5]
    assert torch_xla.calls == [{"nprocs": None, "start_method": "fork", "precision": "bf16"}]
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_each_starts_without_a_state(torch_xla):
    storage.process.current["left"] = "behind"
    seen = []
    xla.run(Request(lambda: seen.append(dict(storage.process.current))), {})
    assert seen == [{}, {}]


def test_one_core_is_used_from_here(torch_xla):
    state, seen = storage.process.current, []
    xla.run(Request(lambda: seen.append(storage.process.current is state), num_processes=1), {})
    assert seen == [True]
    assert torch_xla.calls[0]["nprocs"] == 1


def test_the_number_must_be_that_of_the_cores(torch_xla):
    seen = []
    xla.run(Request(lambda: seen.append(1), num_processes=2), {})
    assert seen == [1, 1]
    with pytest.raises(WorkerError, match="num_processes is 8, and torch_xla runs 2 on this machine"):
        xla.run(Request(lambda: seen.append(1), num_processes=8), {})
    assert seen == [1, 1]


def test_a_failure_comes_with_its_traceback_and_its_rank(torch_xla):
    def train():
        if not seen:
            return seen.append(1)
        raise KeyError("what went wrong")

    seen = []
    with pytest.raises(
        WorkerError, match=r"(?s)Rank 1 failed in train:.*in train.*KeyError: 'what went wrong'"
    ) as caught:
        xla.run(Request(train), {})
    assert "notebook/xla.py" not in str(caught.value)


def test_a_process_that_vanished(torch_xla):
    torch_xla.error = BrokenProcessPool("terminated abruptly")
    with pytest.raises(WorkerError, match="A process of print ended without a traceback"):
        xla.run(Request(print), {})


def test_torch_xlas_own_errors_pass(torch_xla):
    torch_xla.error = OSError("no TPU")
    with pytest.raises(OSError, match="no TPU"):
        xla.run(Request(print), {})


def test_a_tpu_in_use_is_refused(torch_xla):
    torch_xla.initialized = True
    with pytest.raises(RuntimeError, match="uses the TPU already"):
        xla.run(Request(print), {})
    assert torch_xla.calls == []
