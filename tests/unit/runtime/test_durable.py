"""What is written is on the disk, hashed, in one step; one checksum for a file, however it is cut into pieces."""

import errno
import os

import pytest

from accelerate.checkpoint.manifest import FileEntry
from accelerate.runtime import durable

MB = 1 << 20


def written(path, data, step=777_777):
    with durable.durable(path) as file:
        for start in range(0, len(data), step):
            assert file.write(data[start : start + step]) == len(data[start : start + step])
    entry = FileEntry.of(file)
    assert path.read_bytes() == data
    assert {(entry.size, entry.checksum)} == {durable.of_file(path, threads) for threads in (1, 3)}
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("size", [0, 1, MB, 8 * MB - 1, 16 * MB, 16 * MB + 1, 33 * MB + 7])
@pytest.mark.parametrize("step", [40_000, 777_777, 100 * MB])
def test_any_size_in_any_steps(tmp_path, size, step):
    written(tmp_path / "f", os.urandom(size), step)


def test_small_things_between_large_ones_stay_in_order(tmp_path):
    parts = [b"a", b"bc", b"d" * 400_000, b"", b"e", b"f" * 9, b"g" * MB, b"h" * 11, b"i", *[b"j" * 60_000] * 40]
    with durable.durable(tmp_path / "f") as file:
        assert [file.write(part) for part in parts] == [len(part) for part in parts]
        file.flush()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("at", [0, 16 * MB - 1, 16 * MB, 17 * MB - 1])
def test_a_flipped_bit_shows(tmp_path, at):
    data = bytearray(17 * MB)
    (tmp_path / "f").write_bytes(data)
    before = durable.of_file(tmp_path / "f")
    data[at] ^= 1
    (tmp_path / "f").write_bytes(data)
    after = durable.of_file(tmp_path / "f", 2)
    assert before != after and before[0] == after[0] == 17 * MB


def test_a_file_that_becomes_shorter_is_named(tmp_path):
    (tmp_path / "f").write_bytes(bytes(5))
    with pytest.raises(OSError, match="f' became shorter"):
        durable.digests(tmp_path / "f", [0], 9)


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_error_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, call, fails_at):
    real, count = getattr(os, call), []
    (tmp_path / "x.bin").write_text("old")

    def full(descriptor, *data):
        count.append(1)
        if len(count) >= fails_at or call == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *data)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="x.bin") as caught, durable.durable(tmp_path / "x.bin") as file:
        for _ in range(10):
            file.write(b"x" * 300_000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["x.bin"] and (tmp_path / "x.bin").read_text() == "old"


def test_the_last_of_several_writers_of_one_file_counts(tmp_path):
    with durable.durable(tmp_path / "x.bin", writer=0) as first, durable.durable(tmp_path / "x.bin", writer=1) as last:
        first.write(b"first"), last.write(b"last")
    now = os.stat(tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == b"first" and os.listdir(tmp_path) == ["x.bin"]  # it was closed last
    assert (first.status.st_ino, first.status.st_mtime_ns) == (now.st_ino, now.st_mtime_ns)
    assert last.status.st_ino != now.st_ino
