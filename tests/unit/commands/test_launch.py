"""The launch command in process."""

import argparse
import subprocess
import sys
from unittest.mock import Mock

import pytest

from accelerate.commands import launch
from accelerate.launch import runners
from cases import cases


@pytest.fixture
def ran(monkeypatch, place):
    (place / "train.py").touch()
    calls = []
    monkeypatch.setattr(runners, "run", lambda plan, replace=False: calls.append((plan, replace)))
    return calls


def parse(line):
    return launch.launch_command_parser().parse_args(line.split())


def test_a_process_with_other_work_is_not_replaced(ran, accelerate):
    launch.launch_command(parse("--cpu train.py"))
    assert accelerate("launch", "--cpu", "train.py")[0] == 0
    assert [(plan.script, replace) for plan, replace in ran] == [("train.py", False)] * 2


@pytest.mark.parametrize("name", ["accelerate", "accelerate-launch"])
def test_console_replaces_the_console_script(monkeypatch, name):
    script = argparse.Namespace(__spec__=None, __file__=f"/usr/bin/{name}")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(launch.threading, "active_count", lambda: 1)
    assert launch._owns_process()
    monkeypatch.setattr(launch.threading, "active_count", lambda: 2)
    assert not launch._owns_process()


def test_what_starts_nothing(ran, accelerate):
    status, _, err = accelerate("launch", "--use_megatron_lm", "train.py")
    assert status == 2 and "Traceback" not in err
    assert "Megatron-LM (--use_megatron_lm, from the command line) is not available" in err
    status, out, _ = accelerate("launch", "--dry_run", "--cpu", "--num_processes", "2", "train.py", "--lr", "1")
    assert status == 0 and "train.py --lr 1" in out and ran == []


def test_exit_status_is_that_of_the_script(monkeypatch, accelerate, ran):
    monkeypatch.setattr(runners, "run", Mock(side_effect=subprocess.CalledProcessError(3, ["x"])))
    status, _, err = accelerate("launch", "--cpu", "train.py")
    assert status == 3 and "exit status 3" in err
    assert accelerate("launch", "--quiet", "--cpu", "train.py")[2] == ""
    assert "Traceback" in accelerate("launch", "--debug", "--cpu", "train.py")[2]


def test_validate_fills_the_arguments(ran, place):
    args, config, from_file = launch._validate_launch_command(parse("--num_processes 2 train.py"))
    assert (args.use_cpu, args.mixed_precision, config, from_file) == (True, "no", None, False)
    (place / "c.yaml").write_text("distributed_type: NO\nmixed_precision: bf16\nuse_cpu: true")
    args, config, from_file = launch._validate_launch_command(parse("--config_file c.yaml train.py"))
    assert (args.mixed_precision, config.mixed_precision, from_file) == ("bf16", "bf16", True)
    assert launch._validate_launch_command(parse("--num_processes 3 missing.py"))[0].num_processes == 3


@cases(
    "name, words, runner",
    ("simple_launcher", "--cpu --num_processes 2 train.py", "single"),
    ("multi_gpu_launcher", "--cpu train.py", "local"),
    ("deepspeed_launcher", "--cpu train.py", "local"),
    ("deepspeed_launcher", "--cpu --num_machines 2 train.py", "deepspeed"),
    ("tpu_launcher", "train.py", "tpu"),
    ("tpu_pod_launcher", "train.py", "tpu_pod"),
)
def test_launchers_of_other_kinds(ran, name, words, runner):
    getattr(launch, name)(parse(words))
    assert [plan.runner for plan, _ in ran] == [runner]


def test_help_shows_what_was_chosen(monkeypatch):
    assert (launch.clean_option("--num-processes"), launch.clean_option("-m")) == ("num_processes", None)
    monkeypatch.setattr(sys, "argv", ["accelerate", "launch", "--use_fsdp", "--help"])
    text = launch.launch_command_parser().format_help()
    assert "--fsdp_version" in text and "--zero_stage" not in text
    monkeypatch.setattr(sys, "argv", ["accelerate", "launch", "--help"])
    assert "--zero_stage" in launch.launch_command_parser().format_help()
