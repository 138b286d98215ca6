"""Temporary folders go with their process."""

import os
import signal
import subprocess
import sys

import pytest

from accelerate.checkpoint import temporary

pytestmark = pytest.mark.skipif(temporary.fcntl is None, reason="no locks that end with a process")


def in_another_process(code, tmp_path):
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, sys\nfrom accelerate.checkpoint import temporary\n{code}"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_temporary_folders_of_killed_processes_go(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with in_another_process("print(temporary.make(), flush=True); sys.stdin.read()", tmp_path) as process:
        folder = process.stdout.readline().strip()
        mine = temporary.make()
        assert os.path.isdir(folder)
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = temporary.make()
    assert not os.path.exists(folder)
    assert os.path.isdir(mine)
    temporary.discard(mine)
    temporary.discard(again)
    temporary.discard(again)
    assert os.listdir(tmp_path) == []


def test_a_fork_leaves_temporary_folders_alone(tmp_path):
    code = (
        "folder = temporary.make()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\n"
        "assert os.path.isdir(folder)\n"
        "print('there')"
    )
    with in_another_process(code, tmp_path) as process:
        assert process.communicate()[0] == "there\n"
    assert os.listdir(tmp_path) == []
