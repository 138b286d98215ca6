"""A rank leaves its traceback for its launcher, or prints it; in fresh processes, which this test launches."""

import json
import os
import subprocess
import sys

import pytest

from accelerate.runtime import failure

pytestmark = pytest.mark.cold

WATCH = "from accelerate.runtime import failure\nfailure.watch()\n"
# What a traceback shows of an exception whose `str()` fails; newer releases changed the words.
UNPRINTABLE = "<exception str() failed>" if sys.version_info >= (3, 11) else "<unprintable ValueError object>"


@pytest.fixture
def error_file(tmp_path):
    return tmp_path / "error.json"


@pytest.fixture
def run(error_file):
    def run(program, **variables):
        own = {failure.LAUNCHER: str(os.getpid()), failure.ERROR_FILE: str(error_file), "RANK": "3"}
        environment = {**os.environ, **own, **variables}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def told(error_file):
    return json.loads(error_file.read_text())[failure.OURS]


def test_a_traceback_is_left_and_not_printed(run, error_file):
    note = "error.add_note('a note')" if sys.version_info >= (3, 11) else ""
    done = run(f"{WATCH}{WATCH}def f():\n    error = ValueError('what went wrong'); {note}\n    raise error\nf()")
    assert done.returncode == 1 and done.stderr == ""
    record = told(error_file)
    assert record["summary"] == "ValueError: what went wrong" and record["rank"] == 3 and not record["shown"]
    assert record["traceback"].startswith("Traceback (most") and "went wrong\n" in record["traceback"]
    assert record["where"] == "<string>:7 in f" and record["pid"] != os.getpid() and record["time"] > 0


def test_torch_can_read_it(run, error_file):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    run(f"{WATCH}raise ValueError('x')")
    read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(error_file))
    assert read.message["message"] == "ValueError: x" and "Traceback" in read.message["extraInfo"]["py_callstack"]
    assert read.timestamp == int(told(error_file)["time"])


REPLACE = "import os\ndef full(*args): raise OSError(28, 'No space')\nos.replace = full\n"


@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ("", {failure.LAUNCHER: ""}),
        ("", {failure.LAUNCHER: "1"}),  # the launcher is gone, or this is a child of a rank
        ("", {failure.ERROR_FILE: ""}),
        ("", {failure.ERROR_FILE: os.path.join(os.sep, "nowhere", "error.json")}),
        ("import os\nos.getppid = lambda: 1\n", {}),  # the launcher goes later
        (REPLACE, {}),  # the disk is full
    ],
)
def test_what_the_launcher_cannot_read_is_printed(run, error_file, before, variables):
    done = run(f"{WATCH}{before}raise ValueError('printed')", **variables)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: printed\n") and not error_file.exists()


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("'\\udc80 \\x00 \u00e9'", "\udc80"),
        ("'x' * 1_000_000", "characters are omitted"),
        ("type('U', (), {'__str__': lambda self: 1 / 0})()", UNPRINTABLE),
        ("lambda: None", "<function <lambda>"),  # nothing that could be pickled
    ],
)
def test_strange_messages(run, error_file, text, fragment):
    done = run(f"{WATCH}raise ValueError({text})")
    assert done.stderr == "" and fragment in told(error_file)["traceback"]
    assert len(error_file.read_text()) < 3 * failure._LONGEST


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        ("raise SystemExit('a message')", 1, "a message"),
        ("raise SystemExit(3)", 3, ""),
        ("import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()", 0, "ZeroDivisionError"),
        ("import os\nif os.fork() == 0:\n    raise ValueError('child')\nos.wait()", 0, "ValueError: child"),
    ],
)
def test_what_does_not_end_the_rank_is_printed_as_ever(run, error_file, program, code, printed):
    done = run(f"{WATCH}{program}")
    assert done.returncode == code and printed in done.stderr and not error_file.exists()


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_an_interrupt_says_where_it_stood(run, error_file):
    done = run(
        f"{WATCH}import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def train():\n    os.kill(os.getpid(), signal.SIGINT)\n    while True: pass\ntrain()"
    )
    assert done.returncode == -2 and done.stderr == ""
    assert told(error_file)["interrupt"] and "in train" in told(error_file)["where"]


def test_a_hook_of_the_program_prints_in_its_own_way(run, error_file):
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: print('mine:', error, file=sys.stderr)\n"
    done = run(f"{hook}{WATCH}raise ValueError('x')")
    assert done.stderr == "mine: x\n" and told(error_file)["shown"]
    error_file.unlink()
    done = run(f"{WATCH}{hook}raise ValueError('x')")  # set later, it is in charge
    assert done.stderr == "mine: x\n" and not error_file.exists()
    chained = "import sys\nformer = sys.excepthook\nsys.excepthook = lambda *given: (print('mine'), former(*given))\n"
    done = run(f"{WATCH}{chained}raise ValueError('x')")
    assert (done.stdout, done.stderr) == ("mine\n", "") and not told(error_file)["shown"]
    again = "failure.watch(lambda error: 'more')\nraise ValueError('x')"
    done = run(f"{WATCH}{chained}{again}")  # calls itself no second time
    assert done.stdout == "mine\n" and told(error_file)["traceback"].endswith("ValueError: x\nmore")


def test_what_torchs_record_wrote_stays(run, error_file):
    program = (
        f"{WATCH}from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('x')\nmain()"
    )
    done = run(program)
    assert done.stderr == ""
    data = json.loads(error_file.read_text())
    assert data["message"]["message"] == "ValueError: x" and data[failure.OURS]["summary"] == "ValueError: x"
    error_file.write_text(json.dumps({"message": "of a handler of theirs", "more": 1}))
    run(f"{WATCH}raise ValueError('x')")
    data = json.loads(error_file.read_text())
    assert (data["message"], data["more"], data[failure.OURS]["rank"]) == ("of a handler of theirs", 1, 3)
    error_file.write_text("{half")
    run(f"{WATCH}raise ValueError('x')")
    assert told(error_file)["rank"] == 3


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_fault_leaves_where_it_stood(run, error_file):
    done = run(f"{WATCH}import faulthandler\ndef deep():\n    faulthandler._sigsegv()\ndeep()")
    assert done.returncode < 0 and done.stderr == ""
    text = error_file.with_name(failure.FAULTS).read_text()
    assert "Segmentation fault" in text and "in deep" in text


def test_importing_the_package_watches(run, error_file):
    done = run("from accelerate import PartialState\nraise ValueError('early')")
    assert done.stderr == "" and told(error_file)["summary"] == "ValueError: early"
