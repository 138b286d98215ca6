"""The self check is launched as a user's script is."""

import subprocess
import types

import pytest

from accelerate.commands import test as command


@pytest.mark.parametrize("status", [0, 3])
def test_status_is_kept(accelerate, monkeypatch, status):
    calls = []

    def run(words, check):
        calls.append(words)
        return types.SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    got, out, err = accelerate("test", "--config_file", "c.yaml")
    assert got == status
    assert calls[0][1:] == [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "c.yaml",
        "--module",
        "accelerate.test_utils.scripts.test_script",
    ]
    assert ("passed" in out) is (status == 0)
    assert ("failed" in err) is (status != 0)


def test_pytest_leaves_the_command_alone():
    assert command.test_command.__test__ is False
