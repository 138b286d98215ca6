"""One writer at a time, and no lock outlives its process."""

import os
import subprocess
import sys
import threading

import pytest

from accelerate.checkpoint import lock, names
from accelerate.checkpoint.lock import Busy, Lock
from accelerate.checkpoint.storage import LocalStorage

pytestmark = pytest.mark.skipif(lock.fcntl is None, reason="this system has no such locks")


def test_the_second_one_is_refused_or_waits(tmp_path):
    path = str(tmp_path / ".lock_x")
    first, second = Lock(path, "x"), Lock(path, "x")
    first.take("one")
    with pytest.raises(Busy, match="'x'.*former one still running"):
        second.take("two", patience_s=0)
    timer = threading.Timer(0.1, first.release)
    timer.start()
    second.take("two", patience_s=60)
    timer.join()
    second.release()
    assert os.listdir(tmp_path) == []
    second.release()  # once more does nothing


def test_machines_that_share_a_file_system_are_told_so(tmp_path):
    path = str(tmp_path / ".lock_x")
    first = Lock(path, "x")
    first.take("the same save")
    with pytest.raises(Busy, match="save_on_each_node"):
        Lock(path, "x").take("the same save")


def test_a_killed_process_holds_nothing(tmp_path):
    path = str(tmp_path / ".lock_x")
    program = "import os, sys\nfrom accelerate.checkpoint.lock import Lock\nheld = Lock(sys.argv[1], 'x')\nheld.take()\nos.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program, path], timeout=60)
    assert os.path.exists(path)
    Lock(path, "x").take(patience_s=0)


def test_a_fork_does_not_give_it_up(tmp_path):
    path = str(tmp_path / ".lock_x")
    first = Lock(path, "x")
    first.take()
    pid = os.fork()
    if pid == 0:
        first.release()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(Busy):
        Lock(path, "x").take(patience_s=0)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    Lock(str(tmp_path / ".lock_x"), "x").take(patience_s=0)


def test_a_save_in_progress_is_neither_swept_away_nor_joined(tmp_path):
    place = LocalStorage(tmp_path / "checkpoint_1")
    folder = place.stage("a")
    assert place.parent().sweep() == [] and os.path.isdir(folder)
    with pytest.raises(Busy, match="Two machines"):
        LocalStorage(tmp_path / "checkpoint_1").stage("a")
    place.abandon()
    assert os.listdir(tmp_path) == []
    again = LocalStorage(tmp_path / "checkpoint_1")
    again.stage("b")
    again.abandon()
    (tmp_path / f"{names.LOCK_PREFIX}checkpoint_7").touch()
    place.parent().sweep()
    assert os.listdir(tmp_path) == [], "a lock that nobody holds means nothing"


def test_a_full_disk_has_no_room_for_a_word_but_locks(tmp_path, monkeypatch):
    path = str(tmp_path / ".lock_x")

    def full(*args):
        raise OSError(lock.errno.ENOSPC, "No space left on device")

    first = Lock(path, "x")
    with monkeypatch.context() as patch:
        patch.setattr(lock.os, "write", full)
        first.take("word")
    with pytest.raises(Busy):
        Lock(path, "x").take(patience_s=0)
    first.release()
    Lock(path, "x").take(patience_s=0)
