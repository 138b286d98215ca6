"""What reaches the machines of a TPU pod, through gcloud and through torch_xla's own launcher."""

import shlex
import subprocess
import sys

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.resolve import resolve

CONFIG = """
distributed_type: XLA
num_processes: 8
tpu_use_cluster: true
tpu_name: pod
tpu_zone: zone-a
tpu_env: [A=1]
main_training_function: run
"""
WORKER = (
    "accelerate-launch --tpu --no_tpu_cluster --num_machines 1 --mixed_precision bf16 --dynamo_backend no --num_processes 8 "
    "--main_training_function run"
)


@pytest.fixture
def launch(parse, written):
    def make(line="", arguments=(), config=CONFIG):
        written("c.yaml", config)
        args = parse(f"--config_file c.yaml --quiet --mixed_precision bf16 {line} train.py")
        args.training_script_args = list(arguments)
        return resolve(args)

    return make


def test_gcloud(programs, launch):
    programs.add("gcloud")
    arguments = ("--text", "a; b $(c)", "it's")
    runners.run(launch("--env B=x --env C=y", arguments))
    words = programs.calls()[0]["arguments"]
    assert words[:-4] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "zone-a"]
    assert words[-4] == "--command" and words[-2:] == ["--worker", "all"]
    # A shell of each machine reads it.
    assert shlex.split(words[-3]) == [
        *("env", "ACCELERATE_IN_TPU_POD=1", "B=x", "C=y"),
        *WORKER.split(),
        "train.py",
        *arguments,
    ]


def test_sudo_machines_and_options(programs, launch):
    programs.add("gcloud")
    runners.run(launch("--tpu_use_sudo --vm 0 --vm 2 --downcast_bf16 --debug"))
    words = programs.calls()[0]["arguments"]
    assert words[-1] == "0,2"
    remote = shlex.split(words[-3])
    assert remote[:4] == ["sudo", "env", "ACCELERATE_IN_TPU_POD=1", "A=1"] and remote[4] == "accelerate-launch"
    assert remote[-3:] == ["--downcast_bf16", "--debug", "train.py"]


def test_xla_dist_where_torch_xla_has_it(launch, fake_package):
    fake_package("torch_xla", distributed__of__xla_dist="raise SystemExit(9)", distributed__of____init__="")
    (process,) = runners.processes(launch("--vm v1 --vm v2 --tpu_use_sudo"))
    assert process.command[:9] == (
        *(sys.executable, "-m", "torch_xla.distributed.xla_dist", "--restart-tpuvm-pod-server", "--tpu=pod"),
        *("--vm=v1", "--vm=v2", "--env=ACCELERATE_IN_TPU_POD=1", "--env=A=1"),
    )
    assert process.command[9:] == ("--", "sudo", *WORKER.split(), "train.py")


def test_status_is_kept(programs, launch, monkeypatch):
    programs.add("gcloud")
    monkeypatch.setenv("FAKE_STATUS", "4")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(launch())
    assert caught.value.returncode == 4


@pytest.mark.parametrize(
    ("line", "config", "fragment"),
    [
        ("--vm v1", CONFIG, "--vm is 'v1': gcloud knows the machines"),
        ("--env A", CONFIG, "--env is 'A'; write NAME=VALUE"),
        ("--env 1A=2", CONFIG, "--env is '1A'"),
        ("", CONFIG.replace("tpu_name: pod", ""), "Which pod?"),
        ("", CONFIG.replace("tpu_name: pod", "tpu_name: --command=evil"), "is no name of a TPU"),
        ("--max_restarts 1", CONFIG, "--max_restarts"),
    ],
)
def test_refusals(programs, launch, line, config, fragment):
    programs.add("gcloud")
    with pytest.raises(LaunchError) as caught:
        runners.run(launch(line, config=config))
    assert fragment in str(caught.value)
    assert programs.calls() == []


def test_secrets_are_not_put_on_command_lines(launch):
    with pytest.raises(LaunchError) as caught:
        runners.processes(launch("--env HF_TOKEN=verysecret"))
    assert "--env HF_TOKEN holds a secret" in str(caught.value) and "verysecret" not in str(caught.value)


def test_no_gcloud(programs, launch):
    with pytest.raises(LaunchError, match="gcloud is not on the PATH"):
        runners.run(launch())
    assert runners.processes(launch())[0].command[0] == "gcloud"
