"""Processes of the cores of a TPU, with a torch_xla that records what it is told."""

import json
import subprocess
import sys

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.runners import tpu

SPAWN = """
import multiprocessing, sys
def spawn(function, args=(), nprocs=None, join=True, daemon=False, start_method="spawn"):
    # One core runs in this process, as in torch_xla.
    if nprocs == 1:
        return function(0, *args)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=function, args=(index, *args)) for index in range(2)]
    for process in processes:
        process.start()
        process.join()
    sys.exit(max(process.exitcode for process in processes))
"""
SCRIPT = """
import json, os, sys
from accelerate.launch import plan  # a script may use the package
def main():
    with open("record", "a") as file:
        seen = {name: os.environ.get(name) for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "FORK_LAUNCHED")}
        print(json.dumps([__name__, sys.argv, seen]), file=file)
def other():
    sys.exit(7)
number = 3
"""


@pytest.fixture
def xla(fake_package, place, monkeypatch):
    fake_package("torch_xla", distributed__of____init__="", distributed__of__xla_multiprocessing=SPAWN)
    monkeypatch.setenv("PYTHONPATH", str(place / "packages"))
    (place / "train.py").write_text(SCRIPT)
    return lambda: [json.loads(line) for line in (place / "record").read_text().splitlines()]


def test_the_function_runs_on_each_core(xla, plan):
    runners.run(plan("--tpu --quiet --num_processes 8 --mixed_precision bf16"))
    assert (
        xla() == [["train", ["train.py"], {"XLA_USE_BF16": "1", "XLA_DOWNCAST_BF16": None, "FORK_LAUNCHED": "1"}]] * 2
    )


def test_one_core_a_module_and_arguments(xla, parse):
    from accelerate.launch.resolve import resolve

    line = "--tpu --quiet --num_processes 1 --mixed_precision bf16 --downcast_bf16 -m train --lr 1 -- -x"
    runners.run(resolve(parse(line)))
    ((name, argv, seen),) = xla()
    assert (name, argv[1:], seen["XLA_DOWNCAST_BF16"]) == ("train", ["--lr", "1", "--", "-x"], "1")


def test_status_of_a_failure(xla, plan):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(plan("--tpu --quiet --num_processes 8 --main_training_function other"))
    assert caught.value.returncode == 7


@pytest.mark.parametrize("name", ["nothing", "number"])
def test_no_such_function(xla, plan, name, capfd):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(plan(f"--tpu --quiet --num_processes 8 --main_training_function {name}"))
    assert caught.value.returncode == 2
    said = capfd.readouterr().err
    assert f"train.py has no function '{name}'" in said and "Traceback" not in said


def test_what_would_be_started(plan):
    (process,) = runners.processes(plan("--tpu --num_processes 8 --main_training_function f"))
    assert process.command == (
        *(sys.executable, "-m", "accelerate.launch.runners.tpu", "--function", "f", "--", "train.py"),
    )
    assert "--cores" in runners.processes(plan("--tpu --num_processes 1"))[0].command


def test_refusals(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ImportError, match="needs torch_xla"):
        runners.run(plan("--tpu --quiet --num_processes 8"))
    with pytest.raises(LaunchError, match="--log_dir"):
        runners.processes(plan("--tpu --num_processes 8 --log_dir x"))


@pytest.mark.parametrize(
    ("precision", "downcast", "expected"),
    [
        ("bf16", False, {"XLA_USE_BF16": "1"}),
        ("bf16", "no", {"XLA_USE_BF16": "1"}),
        ("bf16", True, {"XLA_DOWNCAST_BF16": "1"}),
        ("no", True, {}),
        (None, False, {}),
    ],
)
def test_precision(precision, downcast, expected):
    assert tpu.precision_variables(precision, downcast) == expected
