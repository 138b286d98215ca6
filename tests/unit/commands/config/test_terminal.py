"""The interview in a real pseudo-terminal: what a person sees, types and finds afterwards."""

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import accelerate

pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")
termios = pytest.importorskip("termios")

UP, DOWN, ENTER = "\x1b[A", "\x1b[B", "\r"
SOURCE = Path(accelerate.__file__).parents[1]
PROGRAM = "import sys; from accelerate.commands.accelerate_cli import main; sys.argv[0] = 'accelerate'; main()"


class Terminal:
    """A process in a pseudo-terminal of a given size."""

    def __init__(self, place, **variables):
        self.main, self.worker = pty.openpty()
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.worker)
        self.output = ""
        self.seen = 0
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        # Nothing here answers the question where the cursor is.
        environ |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
        words = [sys.executable, "-c", PROGRAM, "config", "--config_file", str(place / "c.yaml")]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.worker)
        self.process = subprocess.Popen(words, cwd=place, env=environ, preexec_fn=self._own_terminal, **streams)

    @staticmethod
    def _own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the suite may ignore it

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

    def answer(self, *dialogue):
        """Wait for each question and type what follows it."""
        for question, keys in zip(dialogue[::2], dialogue[1::2], strict=True):
            self.until(question)
            self.type(keys)

    def end(self):
        """Wait for the end; returns the status and what was printed since the last wait."""
        deadline = time.monotonic() + 60
        while self._read(0.2) or (self.process.poll() is None and time.monotonic() < deadline):
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

    def run(**options):
        opened.append(Terminal(place, **options))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


@pytest.fixture
def menus():
    pytest.importorskip("questionary")


def test_menus_and_lines(terminal, place, menus):
    window = terminal()
    window.answer(
        *("Where should the training run?", ENTER, "On what should the training run?", DOWN + DOWN + UP + ENTER),
        *("How many machines take part. [1]", ENTER, "How should the processes share the model?", "j" + ENTER),
        *("torch.compile? [yes/NO]", ENTER, "FSDP generation.", "2" + ENTER),
        *("Free gathered parameters", "no" + ENTER, "on the CPU (true or false).", ENTER),
        *("What is wrapped", UP + ENTER, "Shape of checkpoints", ENTER),
        *("load pretrained weights", ENTER, "Recompute activations", ENTER),
        *("ParallelismConfig", ENTER, "mpirun", ENTER),
        *("How many processes to start", "x" + ENTER, "it must be an integer", "4" + ENTER),
        *("Number format of the forward", "k\x1bOA" + ENTER),  # upwards, round the end, in both forms of the key
        *("Check before each collective", "yes" + ENTER),
    )
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
    assert termios.tcgetattr(window.worker) == window.before


@pytest.mark.parametrize(
    ("key", "at", "status", "said"),
    [
        ("\x03", "menu", 130, "interrupted"),
        ("\x03", "line", 130, "interrupted"),
        ("\x04", "line", 2, "The input ended before the last question was answered; nothing was written."),
    ],
)
def test_an_end_of_the_questions_leaves_nothing(terminal, place, menus, key, at, status, said):
    (place / "c.yaml").write_text("distributed_type: 'NO'\n")
    window = terminal()
    window.until("Where should the training run?")
    if at == "line":
        window.type(ENTER)
        window.answer("On what should", "2" + ENTER)
        window.until("How many machines take part. [1]")
    window.type(key)
    ended, rest = window.end()
    assert (ended, said in rest) == (status, True)
    assert "Traceback" not in window.output
    assert (place / "c.yaml").read_text() == "distributed_type: 'NO'\n"
    assert sorted(path.name for path in place.iterdir() if path.is_file()) == ["c.yaml"]
    assert termios.tcgetattr(window.worker) == window.before


@pytest.mark.parametrize("why", ["dumb", "", "not installed"])
def test_numbers_where_there_are_no_menus(terminal, place, why):
    (place / "questionary.py").write_text("raise ImportError")
    window = terminal(**({"PYTHONPATH": f"{place}:{SOURCE}"} if why == "not installed" else {"TERM": why}))
    window.answer("Number: [1]", "\n", "11. TPUs of Google", "", "Number: [1]", "2\n")
    window.until("How many machines")
    window.type("\x03")
    assert window.end()[0] == 130
    assert "\x1b" not in window.output
