"""What the launchers of functions decide before anything is started; `test_notebook.py` starts processes."""

import os
import sys
import types

import pytest
import torch

from accelerate.devices import table
from accelerate.extensions.notebook import launchers
from accelerate.extensions.notebook import processes as notebook
from accelerate.extensions.notebook.launchers import NotAvailableError, debug_launcher, notebook_launcher
from accelerate.extensions.notebook.launchers import test_launch as join_only
from accelerate.state import PartialState


class Device:
    """A GPU that is not there."""

    type = "cuda"

    def __init__(self, count=2, in_use=False):
        self._count, self.in_use = count, in_use

    def count(self):
        return self._count

    def namespace(self):
        return types.SimpleNamespace(is_initialized=lambda: self.in_use)


@pytest.fixture(autouse=True)
def quiet_place(monkeypatch):
    ours = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
    for name in ("RANK", "WORLD_SIZE", *ours, "TPU_NAME", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def device(monkeypatch):
    return lambda device: monkeypatch.setattr("accelerate.devices.table.detect", lambda cpu=False: device)


@pytest.fixture
def started(monkeypatch):
    """Start nothing; list what would be."""
    calls = []

    def run(request, environment, num_processes, method):
        calls.append(types.SimpleNamespace(**{k: v for k, v in locals().items() if k != "calls"}))

    monkeypatch.setattr(notebook, "run", run)
    return calls


def train():
    pass


def test_no_precision_leaves_the_choice_to_the_environment_and_no_file_is_read(monkeypatch, default_file):
    default_file("num_processes: 2\nmixed_precision: bf16\n")
    seen = []
    notebook_launcher(lambda: seen.append(os.environ["ACCELERATE_MIXED_PRECISION"]))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for argument in ("no", "fp16"):
        notebook_launcher(lambda: seen.append(os.environ["ACCELERATE_MIXED_PRECISION"]), mixed_precision=argument)
    assert seen == ["no", "bf16", "fp16"] and os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_a_state_that_a_run_on_one_process_has_left_is_no_hindrance(started):
    notebook_launcher(lambda: PartialState(cpu=True), num_processes=1)
    notebook_launcher(lambda: PartialState(cpu=True), num_processes=1)
    notebook_launcher(train, num_processes=2)
    assert len(started) == 1
    PartialState._reset_state()
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="has an Accelerator already"):
        notebook_launcher(train, num_processes=2)


def test_process_group_is_refused(process_group, started):
    for start in (debug_launcher, notebook_launcher):
        with pytest.raises(ValueError, match="belongs to a process group"):
            start(train, num_processes=2)
    assert started == []


def test_a_process_of_a_run_starts_no_other(monkeypatch, started):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for start in (debug_launcher, notebook_launcher):
        with pytest.raises(ValueError, match="_launcher is called in a process that is rank 1 of 2 already.*directly"):
            start(train)
    seen = []
    notebook_launcher(lambda: seen.append(1), num_processes=1)  # here, that is
    assert seen == [1] and started == []


def test_one_process_per_device_by_default_and_at_most(device, started, capsys):
    device(Device(count=3))
    with pytest.raises(ValueError, match="num_processes is 4, and there are 3 cuda devices"):
        notebook_launcher(train, num_processes=4)
    notebook_launcher(train, use_port="29501")
    (call,) = started
    assert (call.num_processes, call.request.chosen_port) == (3, 29501)
    assert "ACCELERATE_USE_CPU" not in call.environment
    assert capsys.readouterr().out == "Launching training on 3 GPUs.\n"


def test_a_device_in_use_means_fresh_processes(device, started, capsys):
    device(Device(in_use=True))
    notebook_launcher(join_only, num_processes=2)
    assert started[0].method == "spawn"
    assert "takes longer: this process uses the cuda device already" in capsys.readouterr().out


@pytest.fixture
def driver(monkeypatch):
    """Torch for CUDA with two GPUs: what it has called, and in a forked process whether the driver had been started before."""
    calls, home = [], os.getpid()
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: calls.append(os.getpid()) or 2, raising=False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != home in calls)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    table.forget()
    yield calls
    table.forget()


def test_gpus_are_counted_in_a_way_that_lets_processes_be_forked(driver, started, capsys):
    notebook_launcher(join_only)
    assert (started[0].method, started[0].num_processes, driver) == ("fork", 2, [])
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in {**os.environ, **started[0].environment}
    assert torch.cuda.is_available() and driver  # as libraries do when they are imported
    notebook_launcher(join_only)
    assert started[1].method == "spawn" and not torch.cuda.is_initialized()
    assert "this process uses the cuda device already" in capsys.readouterr().out


@pytest.mark.parametrize("start", [debug_launcher, notebook_launcher])
def test_systems_without_fork(monkeypatch, started, start):
    start(join_only, num_processes=2)
    monkeypatch.delattr(os, "fork")
    start(join_only, num_processes=2)
    assert [call.method for call in started] == ["fork", "spawn"]


def test_a_fresh_process_that_imports_the_script_starts_no_other(monkeypatch, started):
    monkeypatch.setattr(launchers.multiprocessing, "current_process", lambda: types.SimpleNamespace(_inheriting=True))
    with pytest.raises(RuntimeError, match="behind `if __name__ == '__main__':`"):
        debug_launcher(join_only)
    assert started == []


@pytest.mark.parametrize(("gpus", "asked", "count"), [(1, 8, None), (2, 8, 2), (2, 2, 2), (2, None, 2)])
def test_colab_takes_what_it_has(device, started, monkeypatch, capsys, gpus, asked, count):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    device(Device(count=gpus))
    seen = []
    notebook_launcher(lambda: seen.append(1), num_processes=asked)
    assert [call.num_processes for call in started] == ([] if count is None else [count])
    assert len(seen) == (count is None)
    assert ("num_processes=8 is not used" in capsys.readouterr().out) is (asked == 8)


@pytest.mark.parametrize("variable", ["KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG", None])
def test_a_hosted_tpu_without_its_library(monkeypatch, variable):
    monkeypatch.setenv("TPU_NAME", "local")
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    if variable is None:
        notebook_launcher(train)
        return
    monkeypatch.setenv(variable, "x")
    with pytest.raises(NotAvailableError, match="torch_xla.*is not installed"):
        notebook_launcher(train)


@pytest.mark.parametrize(("asked", "words"), [(None, "all TPU cores"), (8, "8 TPU cores"), (1, "one TPU core")])
def test_tpus(device, monkeypatch, capsys, asked, words):
    device(types.SimpleNamespace(type="xla"))
    calls = []
    monkeypatch.setattr(notebook, "run_on_tpu", lambda request: calls.append((request, dict(os.environ))))
    notebook_launcher(train, num_processes=asked, mixed_precision="bf16")
    ((request, environment),) = calls
    assert request.num_processes == asked
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert words in capsys.readouterr().out


def test_all_arguments_arrive(started):
    meeting = ("c10d", "127.0.0.1:29502", {"timeout": 3}, "mine")
    given = (train, (), 2, "no", "29501", "127.0.0.1", 0, 1, *meeting, 4, 0.5, "[${rank}] ")
    with pytest.warns(UserWarning, match="log_line_prefix_template has no effect"):
        notebook_launcher(*given)
    assert tuple(vars(started[0].request).values()) == given[:-1]


def test_tokenizers_is_kept_from_its_threads(started, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    debug_launcher(train)
    monkeypatch.setitem(sys.modules, "tokenizers", types.ModuleType("tokenizers"))
    debug_launcher(train)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    debug_launcher(train)
    assert [call.environment.get("TOKENIZERS_PARALLELISM") for call in started] == [None, "false", "true"]
