"""What is written reaches the file in order, past the system's cache where that is possible, and an error names the file."""

import errno
import os
import threading

import pytest

from accelerate.checkpoint import checksum, disk, durable

BLOCK, PIECE = 8192, 1000


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(durable, "_BLOCK", BLOCK)
    monkeypatch.setattr(durable, "_PIECE", PIECE)
    monkeypatch.setattr(durable, "_SMALL", 100)


@pytest.fixture
def writes(monkeypatch):
    """What the system is given: sizes, and whether it goes past the cache."""
    real, seen = os.write, []

    def write(descriptor, data):
        import fcntl

        seen.append((len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)))
        return real(descriptor, data)

    monkeypatch.setattr(durable.os, "write", write)
    return seen


def written(path, data, step=777):
    with durable.durable(path) as file:
        for start in range(0, len(data), step):
            assert file.write(data[start : start + step]) == len(data[start : start + step])
    entry = file.entry()
    assert path.read_bytes() == data
    assert (entry.size, entry.checksum) == checksum.of_file(path)


def takes_direct(folder):
    with open(folder / "probe", "wb") as file:
        return disk.set_direct(file.fileno(), True)


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 4097])
@pytest.mark.parametrize("step", [50, 777, 100_000])
def test_any_size_in_any_steps(tmp_path, size, step):
    written(tmp_path / "f", os.urandom(size), step)


def test_small_things_between_large_ones_stay_in_order(tmp_path):
    parts = [b"a", b"bc", b"d" * 40_000, b"", b"e", b"f" * 9, b"g" * PIECE, b"h" * 11, b"i"]
    with durable.durable(tmp_path / "f") as file:
        assert [file.write(part) for part in parts] == [len(part) for part in parts]
        file.flush()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)


def test_whole_blocks_go_past_the_cache(tmp_path, writes):
    if not takes_direct(tmp_path):
        pytest.skip("this file system always uses the cache")
    written(tmp_path / "f", os.urandom(2 * BLOCK + 5))
    assert writes == [(BLOCK, True), (BLOCK, True), (5, False)]


def test_that_can_be_switched_off(tmp_path, writes, monkeypatch):
    begun = []
    monkeypatch.setattr(disk, "start_writing", lambda descriptor, start, size: begun.append((start, size)))
    monkeypatch.setenv("ACCELERATE_CHECKPOINT_DIRECT_IO", "0")
    written(tmp_path / "f", os.urandom(2 * BLOCK + 5))
    assert [direct for _, direct in writes] == [False] * 3
    assert begun == [(0, BLOCK), (BLOCK, BLOCK)], "the disk begins while more is written"


def test_a_file_system_that_does_not_want_it_like_that(tmp_path, monkeypatch):
    """Whether it says so at once, when it is written to, or by taking an odd part."""
    real = os.write
    monkeypatch.setattr(disk, "set_direct", lambda descriptor, direct: direct)
    calls = []

    def odd(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data[:3000])

    monkeypatch.setattr(durable.os, "write", odd)
    written(tmp_path / "f", os.urandom(3 * BLOCK + 5))
    monkeypatch.setattr(disk, "set_direct", lambda descriptor, direct: False)
    written(tmp_path / "g", os.urandom(3 * BLOCK + 5))


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_error_names_the_file_and_leaves_nothing(tmp_path, monkeypatch, call, fails_at):
    real, count = getattr(os, call), []

    def full(descriptor, *data):
        count.append(1)
        if len(count) >= fails_at or call == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *data)

    monkeypatch.setattr(durable.os, call, full)
    with pytest.raises(OSError, match="x.bin") as caught, durable.durable(tmp_path / "x.bin") as file:
        for _ in range(10):
            file.write(b"x" * 3000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_an_interpreter_that_starts_no_more_threads(tmp_path, monkeypatch):
    def none(self, *args):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(durable.ThreadPoolExecutor, "submit", none)
    written(tmp_path / "f", os.urandom(3 * BLOCK + 5))


def test_no_thread_and_no_descriptor_stay(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    written(tmp_path / "f", os.urandom(3 * BLOCK))
    with pytest.raises(KeyError), durable.durable(tmp_path / "g") as file:
        file.write(os.urandom(3 * BLOCK))
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-disk")]
    assert before in (0, len(os.listdir("/proc/self/fd")))
    assert os.listdir(tmp_path) == ["f"]


def test_a_system_that_cannot_begin_early(monkeypatch):
    disk.start_writing(-1, 0, 1)  # fsync will tell
    monkeypatch.setattr(disk, "_sync_file_range", lambda: None)
    disk.start_writing(-1, 0, 1)


def test_a_system_without_the_flag(monkeypatch):
    monkeypatch.setattr(disk, "fcntl", None)
    assert not disk.set_direct(0, True)


def test_a_thread_that_rests_does_so_until_somebody_waits(tmp_path, monkeypatch):
    hurry, rests = threading.Event(), []
    monkeypatch.setattr(hurry, "wait", lambda seconds: rests.append(seconds) or (len(rests) == 3 and hurry.set()))
    with durable.resting(3.0, hurry):
        written(tmp_path / "f", os.urandom(6 * BLOCK))
    assert len(rests) == 3 and all(seconds >= 0 for seconds in rests)
    written(tmp_path / "g", os.urandom(6 * BLOCK))
    assert len(rests) == 3
