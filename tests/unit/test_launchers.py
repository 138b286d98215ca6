"""What the launchers of functions decide before anything is started; `tests/distributed/test_notebook.py` starts processes."""

import contextlib
import inspect
import os
import sys
import threading
import types

import pytest

from accelerate import launchers
from accelerate.launch import notebook
from accelerate.launch.errors import NotAvailableError
from accelerate.launchers import debug_launcher, notebook_launcher
from accelerate.launchers import test_launch as join_only
from accelerate.state import PartialState


class Device:
    """A GPU that is not there."""

    type = "cuda"

    def __init__(self, count=2, in_use=False, spoiled=False):
        self._count, self.in_use, self.spoiled = count, in_use, spoiled

    def count(self):
        return self._count

    def namespace(self):
        return types.SimpleNamespace(is_initialized=lambda: self.in_use, _is_in_bad_fork=lambda: self.spoiled)


@pytest.fixture(autouse=True)
def quiet_place(monkeypatch):
    names = "RANK WORLD_SIZE ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU TPU_NAME COLAB_RELEASE_TAG"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def device(monkeypatch):
    return lambda device: monkeypatch.setattr("accelerate.devices.probe.detect", lambda cpu=False: device)


@pytest.fixture
def started(monkeypatch):
    """Start nothing; list what would be."""
    calls = []

    def run(request, method, environment, num_processes):
        calls.append(types.SimpleNamespace(**{k: v for k, v in locals().items() if k != "calls"}))

    monkeypatch.setattr(notebook, "run", run)
    return calls


def train():
    pass


def test_one_process_runs_here():
    seen = []
    notebook_launcher(
        lambda: seen.append((os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"])), mixed_precision="BF16"
    )
    assert seen == [(os.getpid(), "bf16")]
    with pytest.raises(KeyError, match="mine"):
        notebook_launcher(lambda: {}["mine"])
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    join_only()
    assert PartialState._shared_state and join_only.__test__ is False


@pytest.mark.parametrize(("argument", "variable", "effective"), [("no", "bf16", "bf16"), ("fp16", "bf16", "fp16")])
def test_no_precision_leaves_the_choice_to_the_environment(monkeypatch, argument, variable, effective):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    seen = []
    notebook_launcher(lambda: seen.append(os.environ["ACCELERATE_MIXED_PRECISION"]), mixed_precision=argument)
    assert seen == [effective]
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == variable


def test_a_configuration_file_is_not_read(monkeypatch, tmp_path):
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.yaml").write_text("num_processes: 2\nmixed_precision: bf16\nuse_cpu: true\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    seen = []
    notebook_launcher(lambda: seen.append(os.environ["ACCELERATE_MIXED_PRECISION"]))
    assert seen == ["no"]


def test_existing_accelerator_is_refused(started):
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="has an Accelerator already"):
        notebook_launcher(train, num_processes=2)
    assert started == []


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


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_more_processes_than_devices(device, kind, capsys):
    device(types.SimpleNamespace(type=kind, count=lambda: 1, namespace=lambda: types.SimpleNamespace()))
    with pytest.raises(ValueError, match=f"num_processes is 2, and there are 1 {kind} devices"):
        notebook_launcher(train, num_processes=2)
    notebook_launcher(train)
    assert f"one {'GPU' if kind == 'cuda' else 'MPS'}" in capsys.readouterr().out


def test_one_process_per_device_by_default_and_all_arguments_arrive(device, started, capsys):
    device(Device(count=3))
    names = list(inspect.signature(notebook_launcher).parameters)
    given = dict(zip(names, [train, (), None, "no", "29501"], strict=False))
    given |= {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:29502",
        "rdzv_conf": {"timeout": 3},
        "rdzv_id": "mine",
    }
    given |= {"max_restarts": 4, "monitor_interval": 0.5, "log_line_prefix_template": "[${rank}] "}
    notebook_launcher(**given)
    (call,) = started
    sent = dict(zip(names, vars(call.request).values(), strict=True))
    assert {name: sent[name] for name in given} == given
    assert (call.num_processes, call.request.chosen_port, call.method) == (3, 29502, "fork")
    assert "ACCELERATE_USE_CPU" not in call.environment
    assert capsys.readouterr().out == "Launching training on 3 GPUs.\n"


def test_the_processor_is_asked_for(device, started):
    device(types.SimpleNamespace(type="cpu", count=lambda: 1))
    notebook_launcher(train, num_processes=2, mixed_precision="bf16")
    assert started[0].environment["ACCELERATE_USE_CPU"] == "true"
    assert started[0].environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_a_device_in_use_means_fresh_processes(device, started, capsys, monkeypatch):
    device(Device(in_use=True))
    monkeypatch.setattr(notebook, "culprit", lambda name: f"Somebody used {name}.")
    notebook_launcher(join_only, num_processes=2)
    assert started[0].method == "spawn"
    assert (
        "Starting fresh processes, as the cuda device is in use in this process already. Somebody used cuda."
        in capsys.readouterr().out
    )


def test_a_device_that_was_only_counted(device, started, capsys):
    device(Device(spoiled=True))
    notebook_launcher(join_only, num_processes=2)
    assert started[0].method == "spawn"
    assert "has counted the GPUs" in capsys.readouterr().out


def test_a_function_that_cannot_be_sent_is_refused_with_the_first_use_and_the_obstacle(device, started, monkeypatch):
    pytest.importorskip("cloudpickle")
    device(Device(in_use=True))
    monkeypatch.setattr(notebook, "culprit", lambda name: "greedy/core.py did it.")
    lock = threading.Lock()
    with pytest.raises(
        RuntimeError, match=r"cannot be forked.*greedy/core.py did it.*<lambda> cannot be sent.*restart the notebook"
    ):
        notebook_launcher(lambda: lock.acquire(), num_processes=2)
    assert started == []


@pytest.mark.parametrize("start", [debug_launcher, notebook_launcher])
def test_systems_without_fork(monkeypatch, started, start):
    monkeypatch.delattr(os, "fork")
    start(join_only, num_processes=2)
    assert started[0].method == "spawn"


@pytest.mark.parametrize(("gpus", "asked", "count"), [(1, 8, None), (2, 8, 2), (2, 2, 2), (2, None, 2)])
def test_colab_takes_what_it_has(device, started, monkeypatch, capsys, gpus, asked, count):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    device(Device(count=gpus))
    seen = []
    notebook_launcher(lambda: seen.append(1), num_processes=asked)
    assert [call.num_processes for call in started] == ([] if count is None else [count])
    assert len(seen) == (count is None)
    assert ("num_processes=8 is not used" in capsys.readouterr().out) is (asked == 8)
    device(types.SimpleNamespace(type="cpu", count=lambda: 1))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    notebook_launcher(train, num_processes=8)
    assert started[-1].num_processes == 8, "processes on the CPU were asked for"


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
    monkeypatch.setattr(notebook, "run_on_tpu", lambda request, environment: calls.append((request, environment)))
    notebook_launcher(train, num_processes=asked, mixed_precision="bf16")
    ((request, environment),) = calls
    assert request.num_processes == asked
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert words in capsys.readouterr().out
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="has an Accelerator already") if asked != 1 else contextlib.nullcontext():
        notebook_launcher(train, num_processes=asked)


def test_several_machines(started, capsys):
    notebook_launcher(
        train, num_processes=1, num_nodes=2, node_rank=1, master_addr="127.0.0.1", rdzv_conf={"timeout": 5}
    )
    assert started[0].num_processes == 1
    out = capsys.readouterr().out
    assert "Launching training on 2 CPUs" in out
    assert "Number 1 of 2 machines waits at 127.0.0.1:29500 for the others, up to 5 s" in out


def test_tokenizers_is_kept_from_its_threads(started, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    debug_launcher(train)
    monkeypatch.setitem(sys.modules, "tokenizers", types.ModuleType("tokenizers"))
    debug_launcher(train)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    debug_launcher(train)
    assert [call.environment.get("TOKENIZERS_PARALLELISM") for call in started] == [None, "false", "true"]
