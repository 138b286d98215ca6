"""Torch's elastic launcher: its settings, and the environment of a run."""

import os
import signal

import pytest
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.launcher.api import LaunchConfig

from accelerate.launch import elastic
from accelerate.launch.one_machine import ONE_MACHINE
from accelerate.launch.plan import Rendezvous
from accelerate.runtime import failure


@pytest.mark.parametrize(("backend", "name"), [("static", ONE_MACHINE), ("c10d", "c10d")])
def test_config(tmp_path, backend, name):
    config = elastic.make_config(2, Rendezvous(backend, settings={"timeout": "5"}), str(tmp_path), max_restarts=1)
    assert (config.nproc_per_node, config.rdzv_backend, config.max_restarts) == (2, name, 1)
    assert config.rdzv_configs["timeout"] == "5"
    assert config.rdzv_endpoint == "127.0.0.1:0"


def test_log_directory():
    with elastic.log_directory("given") as directory:
        assert directory == "given"
    with elastic.log_directory(None) as directory:
        assert os.path.isdir(directory)
    assert not os.path.exists(directory)


def test_variables_are_those_of_the_run_and_come_back(monkeypatch):
    monkeypatch.setenv("BEFORE", "1")
    seen = {}
    monkeypatch.setattr(elastic, "elastic_launch", lambda config, entry: lambda *args: seen.update(os.environ))
    elastic.start(None, "x", (), {"DURING": "2"})
    assert seen == {"DURING": "2", failure.LAUNCHER: str(os.getpid())}
    assert os.environ["BEFORE"] == "1"
    assert "DURING" not in os.environ


def test_a_program_is_told_who_launched_it_and_a_function_is_not(monkeypatch):
    seen = []
    monkeypatch.setattr(elastic, "elastic_launch", lambda config, entry: lambda *args: seen.append(dict(os.environ)))
    elastic.start(None, "x", (), {})
    elastic.start(None, lambda: None, (), {})
    assert seen == [{failure.LAUNCHER: str(os.getpid())}, {}]


def test_streams_by_rank(tmp_path):
    assert elastic.logs_specs(str(tmp_path), "1:3")._tee == {1: Std.ALL}
    assert elastic.logs_specs(str(tmp_path), {0: 0, 10: 2})._tee == {0: Std.NONE, 10: Std.ERR}


def test_older_versions_of_torch_cannot_be_told_about_signals(monkeypatch):
    kept = {name: field for name, field in LaunchConfig.__dataclass_fields__.items() if name != "signals_to_handle"}
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__:
        assert elastic.own_signals() == {"signals_to_handle": "SIGQUIT"}
    monkeypatch.setattr(LaunchConfig, "__dataclass_fields__", kept)
    assert elastic.own_signals() == {}


def test_windows_has_another_signal_for_torch(monkeypatch):
    monkeypatch.delattr(signal, "SIGQUIT")
    assert elastic.own_signals().get("signals_to_handle", "SIGBREAK") == "SIGBREAK"
