"""The launch command in process."""

import subprocess
from unittest.mock import Mock

import pytest

from accelerate.commands import launch
from accelerate.launch import runners


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


def test_dry_run_starts_nothing(ran, accelerate):
    status, out, _ = accelerate("launch", "--dry_run", "--cpu", "--num_processes", "2", "train.py", "--lr", "1")
    assert status == 0 and "train.py --lr 1" in out and ran == []


def test_exit_status_is_that_of_the_script(monkeypatch, accelerate, ran):
    monkeypatch.setattr(runners, "run", Mock(side_effect=subprocess.CalledProcessError(3, ["x"])))
    status, _, err = accelerate("launch", "--cpu", "train.py")
    assert status == 3 and "exit status 3" in err
    assert accelerate("launch", "--quiet", "--cpu", "train.py")[2] == ""
    assert "Traceback" in accelerate("launch", "--debug", "--cpu", "train.py")[2]
