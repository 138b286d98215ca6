"""Ways of starting processes, and actions of parsers, for other programs."""

import argparse

import pytest

from accelerate.commands import launch
from accelerate.commands.utils import _StoreAction, _StoreConstAction, _StoreTrueAction
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


def test_actions_for_other_parsers_have_both_spellings():
    parser = argparse.ArgumentParser()
    parser.add_argument("--a_b", action=_StoreTrueAction)
    parser.add_argument("--c_d", action=_StoreAction)
    parser.add_argument("--e", action=_StoreConstAction, const=3)
    assert vars(parser.parse_args(["--a-b", "--c-d", "x", "--e"])) == {"a_b": True, "c_d": "x", "e": 3}
    assert vars(parser.parse_args([])) == {"a_b": None, "c_d": None, "e": None}
