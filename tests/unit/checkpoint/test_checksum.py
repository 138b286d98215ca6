"""One checksum for a file, however it is cut into pieces."""

import pytest

from accelerate.checkpoint import checksum


def stream(data: bytes, step: int) -> checksum.Checksum:
    made = checksum.Checksum()
    for start in range(0, len(data), step):
        made.update(data[start : start + step])
    return made


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 2500])
def test_written_in_any_steps_and_read_by_any_threads(tmp_path, monkeypatch, size):
    monkeypatch.setattr(checksum, "CHUNK", 1000)
    data = bytes(index * 7 % 251 for index in range(size))
    (tmp_path / "f").write_bytes(data)
    expected = stream(data, 10_000).hexdigest()
    assert {stream(data, step).hexdigest() for step in (1, 7, 999, 1000, 1001)} == {expected}
    told = []
    for threads in (1, 3):
        assert checksum.of_file(tmp_path / "f", threads, told.append) == (size, expected)
    assert sum(told) == 2 * size


@pytest.mark.parametrize("at", [0, 999, 1000, 2499])
def test_a_flipped_bit_shows(monkeypatch, at):
    monkeypatch.setattr(checksum, "CHUNK", 1000)
    data = bytearray(2500)
    before = stream(bytes(data), 100).hexdigest()
    data[at] ^= 1
    assert stream(bytes(data), 100).hexdigest() != before


def test_pieces_that_change_places_show(monkeypatch):
    monkeypatch.setattr(checksum, "CHUNK", 4)
    assert stream(b"aaaabbbb", 8).hexdigest() != stream(b"bbbbaaaa", 8).hexdigest()


def test_any_contiguous_buffer():
    import numpy as np

    numbers = np.arange(6, dtype=np.int32).reshape(2, 3)
    made = checksum.Checksum()
    made.update(memoryview(numbers))
    assert made.size == 24 and made.hexdigest() == stream(numbers.tobytes(), 5).hexdigest()
