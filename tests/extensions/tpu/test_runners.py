"""TPUs: the processes of the cores, with a torch_xla that records its calls, and what reaches the machines of a pod."""

import json
import shlex
import subprocess

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.resolve import resolve
from cases import cases

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
CONFIG = """{distributed_type: XLA, num_processes: 8, tpu_use_cluster: true, tpu_name: pod, tpu_zone: zone-a,
tpu_env: [A=1], main_training_function: run}"""
WORKER = (
    "accelerate-launch --tpu --no_tpu_cluster --num_machines 1 --mixed_precision bf16 --dynamo_backend no --num_processes 8 "
    "--main_training_function run"
)


@pytest.fixture
def xla(fake_package, place, monkeypatch):
    fake_package("torch_xla", distributed__of____init__="", distributed__of__xla_multiprocessing=SPAWN)
    monkeypatch.setenv("PYTHONPATH", str(place / "packages"))
    (place / "train.py").write_text(SCRIPT)
    return lambda: [json.loads(line) for line in (place / "record").read_text().splitlines()]


def test_the_function_runs_on_each_core(xla, plan):
    runners.run(plan("--tpu --quiet --num_processes 8 --mixed_precision bf16"))
    seen = {"XLA_USE_BF16": "1", "XLA_DOWNCAST_BF16": None, "FORK_LAUNCHED": "1"}
    assert xla() == [["train", ["train.py"], seen]] * 2


def test_one_core_a_module_and_arguments(xla, parse):
    line = "--tpu --quiet --num_processes 1 --mixed_precision bf16 --downcast_bf16 -m train --lr 1 -- -x"
    runners.run(resolve(parse(line)))
    ((name, argv, seen),) = xla()
    assert (name, argv[1:], seen["XLA_DOWNCAST_BF16"]) == ("train", ["--lr", "1", "--", "-x"], "1")


@pytest.mark.parametrize(("function", "status", "words"), [("other", 7, ""), ("none", 2, "has no function 'none'")])
def test_a_function_that_fails_or_is_none(xla, plan, function, status, words, capfd):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(plan(f"--tpu --quiet --num_processes 8 --main_training_function {function}"))
    said = capfd.readouterr().err
    assert caught.value.returncode == status and words in said and "Traceback" not in said


@pytest.fixture
def pod(parse, written, programs):
    """Return a plan for a pod; gcloud records its calls."""
    programs.add("gcloud")

    def make(line="", arguments=(), config=CONFIG):
        written("c.yaml", config)
        args = parse(f"--config_file c.yaml --quiet --mixed_precision bf16 {line} train.py")
        args.training_script_args = list(arguments)
        return resolve(args)

    return make


def test_gcloud(programs, pod):
    arguments = ("--text", "a; b $(c)", "it's")
    runners.run(pod("--env B=x --env C=y", arguments))
    words = programs.calls()[0]["arguments"]
    assert words[:-4] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "zone-a"]
    assert words[-4] == "--command" and words[-2:] == ["--worker", "all"]
    # A shell of each machine reads it.
    environment = ["env", "ACCELERATE_IN_TPU_POD=1", "B=x", "C=y"]
    assert shlex.split(words[-3]) == [*environment, *WORKER.split(), "train.py", *arguments]


@cases(
    "line, config, fragment",
    ("--env A", CONFIG, "--env is 'A'; write NAME=VALUE"),
    ("--env HF_TOKEN=verysecret", CONFIG, "--env HF_TOKEN holds a secret"),
    ("", CONFIG.replace("tpu_name: pod,", ""), "Which pod?"),
    ("", CONFIG.replace("tpu_name: pod", "tpu_name: --command=evil"), "is no name of a TPU"),
)
def test_refusals_on_a_pod(programs, pod, line, config, fragment):
    with pytest.raises(LaunchError) as caught:
        runners.run(pod(line, config=config))
    assert fragment in str(caught.value) and "verysecret" not in str(caught.value)
    assert programs.calls() == []
