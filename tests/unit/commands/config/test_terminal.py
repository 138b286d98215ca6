"""The questionnaire in a real pseudo-terminal: what somebody sees, types and finds afterwards."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import yaml

pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")
fcntl = pytest.importorskip("fcntl")
termios = pytest.importorskip("termios")

UP, DOWN, END = "\x1b[A", "\x1b[B", "\x1b[F"
PROGRAM = "import sys; from accelerate.commands.accelerate_cli import main; sys.argv[0] = 'accelerate'; main()"


class Terminal:
    """A process in a pseudo-terminal of a given size."""

    def __init__(self, place, *words, columns=80, rows=24, term="xterm"):
        self.main, worker = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(worker)
        self.output = ""
        self.seen = 0
        environ = {**os.environ, "TERM": term, "HF_HOME": str(place / "home"), "CUDA_VISIBLE_DEVICES": ""}
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=worker,
            stdout=worker,
            stderr=worker,
            cwd=place,
            env=environ,
            preexec_fn=self._own_terminal,
        )
        self.worker = worker

    @staticmethod
    def _own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, columns, rows):
        import struct

        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self, timeout):
        if not select.select([self.main], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self.main, 65536)
        except OSError:
            return False
        self.output += data.decode()
        return bool(data)

    def until(self, text):
        """Wait until a text appears behind what was waited for before."""
        end = time.monotonic() + 60
        while self.output.find(text, self.seen) < 0:
            assert time.monotonic() < end, f"no {text!r} in {self.output!r}"
            assert self._read(1) or self.process.poll() is None, f"ended before {text!r}: {self.output!r}"
        self.seen = self.output.find(text, self.seen) + len(text)

    def type(self, text):
        os.write(self.main, text.encode())

    def end(self):
        """Wait for the end; returns the status and what was printed since the last wait."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.2)
        while self._read(0):
            pass
        return self.process.wait(timeout=1), self.output[self.seen :]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self.main, self.worker):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def terminal(place):
    opened = []

    def run(*words, **options):
        opened.append(Terminal(place, "config", "--config_file", str(place / "c.yaml"), *words, **options))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def left_behind(place):
    return sorted(path.name for path in place.iterdir() if path.name != "home")


def test_arrow_keys(terminal, place):
    window = terminal()
    window.until("Where should the training run?")
    window.type("\r")
    window.until("On what should the training run?")
    window.type(DOWN + DOWN + UP + "\r")
    window.until("How many machines take part? [1]")
    window.type("\n")
    window.until("How should the processes share the model?")
    window.type("j\r")
    window.until("torch.compile? [yes/NO]")
    window.type("\n")
    window.until("Which generation of FSDP")
    window.type("2\r")
    window.until("Should gathered parameters be freed")
    window.type("no\n")
    window.until("kept on the CPU?")
    window.type("\n")
    window.until("divided into wrapped parts?")
    window.type(END + "\r")
    window.until("Which shape should checkpoints have?")
    window.type("\r")
    for question in ("load pretrained weights?", "recomputed in the backward pass", "ParallelismConfig", "mpirun"):
        window.until(question)
        window.type("\n")
    window.until("How many processes should be started in total? [2]")
    window.type("x\n")
    window.until("it must be an integer")
    window.type("4\n")
    window.until("Which precision")
    window.type("k\x1bOA\r")  # upwards, round the end, in both forms of the key
    window.until("(slower)?")
    window.type("yes\n")
    status, rest = window.end()
    assert status == 0, window.output
    assert "Wrote " in rest
    assert "Traceback" not in window.output
    content = yaml.safe_load((place / "c.yaml").read_text())
    assert content["distributed_type"] == "FSDP"
    assert (content["num_processes"], content["mixed_precision"], content["debug"]) == (4, "bf16", True)
    assert content["fsdp_config"]["fsdp_version"] == 2
    assert content["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert content["fsdp_config"]["fsdp_auto_wrap_policy"] == "NO_WRAP"
    assert left_behind(place) == ["c.yaml"]
    assert termios.tcgetattr(window.worker) == window.before


@pytest.mark.parametrize("at", ["menu", "line"])
def test_ctrl_c_leaves_nothing(terminal, place, at):
    (place / "c.yaml").write_text("distributed_type: 'NO'\n")
    window = terminal()
    window.until("Where should the training run?")
    if at == "line":
        window.type("\r")
        window.until("On what should")
        window.type("2\r")
        window.until("How many machines")
    window.type("\x03")
    status, rest = window.end()
    assert status == 130
    assert "stopped; nothing was written" in rest
    assert "Traceback" not in window.output
    assert (place / "c.yaml").read_text() == "distributed_type: 'NO'\n"
    assert left_behind(place) == ["c.yaml"]
    assert termios.tcgetattr(window.worker) == window.before
    assert window.output.count("\x1b[?25l") == window.output.count("\x1b[?25h")


@pytest.mark.parametrize("at", ["menu", "line"])
def test_ctrl_d_is_the_end_of_the_input(terminal, place, at):
    window = terminal()
    window.until("Where should the training run?")
    if at == "line":
        window.type("\r")
        window.until("On what should")
        window.type("2\r")
        window.until("How many machines")
    window.type("\x04")
    status, rest = window.end()
    assert status == 2
    assert "The input ended before the last question was answered; nothing was written." in rest
    assert "Traceback" not in window.output
    assert left_behind(place) == []


def test_typed_ahead(terminal, place):
    window = terminal()
    window.type("\n" * 8)
    status, _ = window.end()
    assert status == 0, window.output
    assert yaml.safe_load((place / "c.yaml").read_text())["distributed_type"] == "NO"


def screen(output, columns, rows):
    """Return what a terminal of that size shows after the output, as far as the menu uses it."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\??\d*[A-Za-z]|\r|\n|[^\x1b\r\n]", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
        elif part.endswith("A") and part.startswith("\x1b"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[J":
            lines = [*lines[:row], lines[row][:column] if row < len(lines) else ""]
        elif not part.startswith("\x1b"):
            if column >= columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return lines


@pytest.mark.parametrize("size", [(24, 24), (80, 6), (12, 5)], ids=str)
def test_a_window_smaller_than_the_text(terminal, place, size):
    columns, rows = size
    window = terminal(columns=columns, rows=rows)
    window.until("training run?")
    window.type("\r")
    window.until("training run?")
    window.type(DOWN * 10)
    window.until("> 11.")
    shown = [line for line in screen(window.output, columns, rows) if line.startswith((">", "  "))]
    assert sum(line.startswith(">") for line in shown) == 1
    window.type("\x03")
    assert window.end()[0] == 130
    shown = screen(window.output, columns, rows)
    assert not [line for line in shown if line.startswith(">")]


def test_a_window_that_shrinks(terminal):
    window = terminal(columns=100)
    window.until("training run?")
    window.type("\r")
    window.until("11. TPUs of Google")
    window.resize(30, 10)
    window.type(DOWN)
    window.until(">  2.")
    window.type("\x03")
    assert window.end()[0] == 130


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor(terminal, place, term):
    window = terminal(term=term)
    window.until("Number: [1]")
    window.type("\n")
    window.until("11. TPUs of Google")
    window.until("Number: [1]")
    window.type("2\n")
    window.until("How many machines")
    window.type("\x03")
    assert window.end()[0] == 130
    assert "\x1b" not in window.output


def test_a_terminal_that_goes_away(terminal, place):
    window = terminal()
    window.until("training run?")
    window.process.send_signal(signal.SIGHUP)
    assert window.end()[0] == -signal.SIGHUP
    assert left_behind(place) == []


def piped(place, text, *words):
    environ = {**os.environ, "HF_HOME": str(place / "home"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, "config", "--config_file", str(place / "c.yaml"), *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environ, timeout=60, cwd=place)


def test_answers_through_a_pipe(place):
    done = piped(place, "1\n2\n1\n1\nno\nno\n3\n3\nno\n")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    content = yaml.safe_load((place / "c.yaml").read_text())
    assert (content["num_processes"], content["mixed_precision"]) == (3, "bf16")


@pytest.mark.parametrize("text", ["", "1\n2\n", "1\n2\nx"])
def test_a_pipe_that_ends_too_early(place, text):
    done = piped(place, text)
    assert done.returncode == 2
    assert "The input ended before the last question" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind(place) == []
