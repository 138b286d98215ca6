"""What the commands share: rows of the option table as arguments, and how errors are answered."""

import os
import subprocess
import sys

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.commands.utils import or_exit
from accelerate.launch.errors import LaunchError, RunError
from cases import cases


def parse(line):
    return launch_command_parser().parse_args(f"{line} train.py".split())


@cases(
    "line, answer",
    ("--mixed_precision fp17", "invalid choice: 'fp17' (choose from 'no', 'fp16', 'bf16', 'fp8')"),
    ("--fsdp_version 7", "(choose from '1', '2')\n"),
    ("--num_processes two", "num_processes is 'two'; it must be an integer"),
    ("--gradient_clipping auto", "gradient_clipping is 'auto'; leave the option out"),
    ("--num_proceses 2", "error: --num_proceses is unknown; did you mean --num_processes?"),
    ("--qqq --gpu_id 0", "error: --qqq is unknown; `accelerate launch --help` lists the options. --gpu_id is"),
)
def test_what_is_not_understood(capsys, line, answer):
    with pytest.raises(SystemExit, match="2"):
        parse(line)
    assert answer in capsys.readouterr().err


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        or_exit("accelerate x", lambda: 1 / 0)
    assert or_exit("accelerate x", max, 1, 2) == 2


@cases(
    "error, line, status",
    (FileNotFoundError(2, "No such file or directory", "c.yaml"), "'c.yaml': No such file or directory.", 2),
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device", 1),
    (ConnectionError("no answer"), "no answer", 1),
    (ValueError(), "ValueError", 2),
    (LaunchError("no"), "no", 2),
    (NotImplementedError("no"), "no", 2),
    (RunError("no"), "no", 1),
    (KeyboardInterrupt(), None, 130),
)
def test_errors_are_one_line_and_a_status(capsys, error, line, status):
    def fail():
        raise error

    with pytest.raises(SystemExit) as caught:
        or_exit("accelerate x", fail)
    assert caught.value.code == status
    said = "\naccelerate x: interrupted\n" if line is None else f"accelerate x: error: {line}\n"
    assert capsys.readouterr().err == said


OR_EXIT = "from accelerate.commands.utils import or_exit; or_exit('accelerate x', print, {!r})"


@pytest.mark.skipif(os.name != "posix", reason="a closed pipe is another error there")
@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "in the middle"])
def test_a_closed_output_is_quiet(lines):
    read, write = os.pipe()
    os.close(read)
    code = OR_EXIT.replace("{!r}", f"'text\\n' * {lines}")
    with os.fdopen(write) as closed:
        streams = {"stdout": closed, "stderr": subprocess.PIPE}
        done = subprocess.run([sys.executable, "-c", code], **streams, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_letters_that_the_output_lacks_are_no_error():
    command = [sys.executable, "-c", OR_EXIT.format("caf\u00e9")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "caf\\xe9\n"), done.stderr
