"""What processes print comes as whole lines."""

import io
import os
import sys

import pytest

from accelerate.launch.notebook.output import WholeLines, descriptors_are_shown, flush, in_whole_lines, into_files


class Pieces:
    """A stream that keeps what it was given, piece by piece."""

    encoding = "utf-8"
    name = "cell"

    def __init__(self):
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)

    def flush(self):
        self.pieces.append("flushed")

    def isatty(self):
        return False


def test_whole_lines():
    stream = Pieces()
    lines = WholeLines(stream)
    print("a", 1, "b", file=lines)
    print("no end", end="", file=lines)
    assert stream.pieces == ["a 1 b\n"]
    lines.flush()
    assert stream.pieces == ["a 1 b\n", "no end", "flushed"]
    assert lines.write("x\ny") == 3
    assert stream.pieces[-1] == "x\n"


def test_an_interrupt_does_not_repeat_a_line():
    class Interrupting(Pieces):
        def write(self, text):
            super().write(text)
            raise KeyboardInterrupt

    stream = Interrupting()
    lines = WholeLines(stream)
    with pytest.raises(KeyboardInterrupt):
        lines.write("once\n")
    lines.flush()
    assert stream.pieces == ["once\n", "flushed"]


def test_progress_bars_move():
    stream = Pieces()
    lines = WholeLines(stream)
    lines.write("\r10%")
    lines.flush()
    assert "".join(stream.pieces) == "\r10%flushed"


def test_it_is_a_stream():
    lines = WholeLines(Pieces())
    assert (lines.encoding, lines.isatty(), lines.writable(), lines.name) == ("utf-8", False, True, "cell")
    with pytest.raises(AttributeError):
        _ = lines.nonsense


def test_only_a_notebooks_streams_are_wrapped(monkeypatch):
    plain = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", plain)
    monkeypatch.setattr(sys, "stderr", Pieces())
    in_whole_lines()
    assert sys.stdout is plain
    wrapped = sys.stderr
    assert isinstance(wrapped, WholeLines)
    in_whole_lines()
    assert sys.stderr is wrapped


def test_an_unbuffered_stream_is_wrapped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
    in_whole_lines()
    print("a", 1, end="")
    assert raw.getvalue() == b""
    print()
    assert raw.getvalue() == b"a 1\n"


def test_whether_descriptors_are_shown(monkeypatch):
    assert descriptors_are_shown()
    monkeypatch.setattr(sys, "stdout", Pieces())
    assert not descriptors_are_shown()
    sys.stdout.watch_fd_thread = object()
    assert descriptors_are_shown()


def test_a_process_without_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    in_whole_lines()
    assert sys.stdout is None


def test_into_files(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            into_files(str(tmp_path))
            print("printed")
            os.write(2, b"raw\n")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "stdout.log").read_text() == "printed\n"
    assert (tmp_path / "stderr.log").read_text() == "raw\n"


def test_output_that_is_gone_hides_no_error(monkeypatch):
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    stream = Pieces()
    monkeypatch.setattr(sys, "stderr", stream)
    flush()
    assert stream.pieces == ["flushed"]
