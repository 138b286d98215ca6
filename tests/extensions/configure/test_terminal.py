"""The interview in a real pseudo-terminal: what a person sees, types and finds afterwards."""

import io
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

import accelerate
from cases import cases

pexpect = pytest.importorskip("pexpect", reason="types into a pseudo-terminal; comes with ipykernel")
termios = pytest.importorskip("termios", reason="Windows has no pseudo-terminals")

UP, DOWN, ENTER = "\x1b[A", "\x1b[B", "\r"
SOURCE = Path(accelerate.__file__).parents[1]
PROGRAM = "import sys; from accelerate.commands.accelerate_cli import main; sys.argv[0] = 'accelerate'; main()"


@pytest.fixture
def terminal(place):
    """Start the interview in a pseudo-terminal; the terminal's settings have to be the old ones at its end."""
    opened = []

    def run(**variables):
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        # Nothing here answers the question where the cursor is.
        environ |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
        # The suite may ignore SIGINT.
        options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
        options |= {"cwd": place, "env": environ, "encoding": "utf-8", "timeout": 60}
        words = ["-c", PROGRAM, "config", "--config_file", str(place / "c.yaml")]
        window = pexpect.spawn(sys.executable, words, **options)
        window.logfile_read = io.StringIO()
        opened.append((window, termios.tcgetattr(window.child_fd)))
        return window

    yield run
    for window, before in opened:
        assert "Traceback" not in window.logfile_read.getvalue()
        assert termios.tcgetattr(window.child_fd) == before
        window.close(force=True)


def answer(window, *dialogue):
    for question, keys in zip(dialogue[::2], dialogue[1::2], strict=True):
        window.expect_exact(question)
        window.send(keys)


def end(window):
    """Wait for the end; returns the status and what was printed since the last question."""
    window.expect(pexpect.EOF)
    return window.wait(), window.before


@pytest.fixture
def menus():
    pytest.importorskip("questionary")


def test_menus_and_lines(terminal, place, menus):
    window = terminal()
    answer(
        window,
        *("Where should the training run?", ENTER, "On what should the training run?", DOWN + DOWN + UP + ENTER),
        *("How many machines take part. [1]", ENTER, "How should the processes share the model?", "j" + ENTER),
        *("torch.compile? [yes/NO]", ENTER, "FSDP generation.", "2" + ENTER),
        *("Free gathered parameters", "no" + ENTER, "on the CPU.", ENTER),
        *("What is wrapped", UP + ENTER, "Shape of checkpoints", ENTER),
        *("Load pretrained weights", ENTER, "Recompute activations", ENTER),
        *("ParallelismConfig", ENTER, "mpirun", ENTER),
        *("How many processes to start", "x" + ENTER, "it must be an integer", "4" + ENTER),
        *("Number format of the forward", "k\x1bOA" + ENTER),  # upwards, round the end, in both forms of the key
        *("Check before each collective", "yes" + ENTER),
    )
    status, rest = end(window)
    assert status == 0 and "Wrote " in rest
    content = yaml.safe_load((place / "c.yaml").read_text())
    wanted = {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16", "debug": True}
    assert wanted.items() <= content.items()
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_auto_wrap_policy": "NO_WRAP"}
    assert fsdp.items() <= content["fsdp_config"].items()


@cases(
    "key, at, status, said",
    ("\x03", "menu", 130, "interrupted"),
    ("\x03", "line", 130, "interrupted"),
    ("\x04", "line", 2, "The input ended before the last question was answered; nothing was written."),
)
def test_an_end_of_the_questions_leaves_nothing(terminal, place, menus, key, at, status, said):
    (place / "c.yaml").write_text("distributed_type: 'NO'\n")
    window = terminal()
    window.expect_exact("Where should the training run?")
    if at == "line":
        window.send(ENTER)
        answer(window, "On what should", "2" + ENTER)
        window.expect_exact("How many machines take part. [1]")
    window.send(key)
    ended, rest = end(window)
    assert (ended, said in rest) == (status, True)
    assert (place / "c.yaml").read_text() == "distributed_type: 'NO'\n"
    assert sorted(path.name for path in place.iterdir() if path.is_file()) == ["c.yaml"]


@pytest.mark.parametrize("why", ["dumb", "", "not installed"])
def test_numbers_where_there_are_no_menus(terminal, place, why):
    (place / "questionary.py").write_text("raise ImportError")
    window = terminal(**({"PYTHONPATH": f"{place}:{SOURCE}"} if why == "not installed" else {"TERM": why}))
    answer(window, "Number: [1]", "\n", "11. TPUs of Google", "", "Number: [1]", "2\n", "How many machines", "\x03")
    assert end(window)[0] == 130
    assert "\x1b" not in window.logfile_read.getvalue()
