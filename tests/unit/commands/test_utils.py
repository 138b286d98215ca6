"""What the commands share."""

import os
import subprocess
import sys

import pytest

from accelerate.commands.utils import CustomArgumentGroup, CustomArgumentParser, or_exit
from accelerate.launch.errors import LaunchError, RunError


def test_parser_and_group_take_both_spellings():
    parser = CustomArgumentParser()
    group = parser.add_argument_group("heading")
    assert isinstance(group, CustomArgumentGroup)
    group.add_argument("--some_name")
    parser.add_argument("--other_name")
    assert parser.parse_args(["--some-name", "1", "--other-name", "2"]).other_name == "2"


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        or_exit("accelerate x", lambda: 1 / 0)
    assert or_exit("accelerate x", max, 1, 2) == 2


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (FileNotFoundError(2, "No such file or directory", "c.yaml"), "'c.yaml': No such file or directory.", 2),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device", 1),
        (ConnectionError("no answer"), "no answer", 1),
        (ValueError(), "ValueError", 2),
        (LaunchError("no"), "no", 2),
        (NotImplementedError("no"), "no", 2),
        (RunError("no"), "no", 1),
        (KeyboardInterrupt(), None, 130),
    ],
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
