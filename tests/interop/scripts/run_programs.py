"""Run the programs of tests/interop/programs one after another, each in a fork of this process, and print what each printed.

`run_programs.py FOLDER NAME[=CHECKPOINT] ...`: a program writes its files into FOLDER/NAME/output, and one that resumes from a
checkpoint into FOLDER/NAME-resumed/output. The forks of a program meet at a port that rank 0 chooses.
"""

import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

import torch._dynamo  # noqa: F401  # the first optimizer imports it, which takes two seconds

from accelerate import Accelerator  # noqa: F401

PROGRAMS = Path(__file__).parents[1] / "programs"
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LIMIT_S = 100


def choose_port(file):
    """Return a free port, the same on all ranks; rank 0 writes it into a file."""
    if RANK == 0:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            written = file.with_suffix(".tmp")
            written.write_text(str(listener.getsockname()[1]))
        written.rename(file)
    end = time.monotonic() + LIMIT_S
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return file.read_text()


def run(name, checkpoint, folder):
    """Run a program in this process, whose output goes into files; a program that hangs is killed."""
    signal.alarm(LIMIT_S)
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{RANK}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    if RANKS > 1:
        # The store of torchrun's agent holds the addresses of the program before.
        os.environ |= {"MASTER_PORT": choose_port(folder / "port"), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    sys.argv[:] = [f"{name}.py", "--output_dir", str(folder / "output")]
    sys.argv += ["--resume_from_checkpoint", checkpoint] if checkpoint else []
    runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")


def main():
    root, results = Path(sys.argv[1]), {}
    for name, _, checkpoint in (word.partition("=") for word in sys.argv[2:]):
        key = f"{name}-resumed" if checkpoint else name
        folder = root / key
        (folder / "output").mkdir(parents=True, exist_ok=True)
        before, child = os.times(), os.fork()
        if child == 0:
            run(name, checkpoint, folder)
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        output, errors = (folder.joinpath(f"{RANK}.{kind}").read_text() for kind in ("out", "err"))
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        results[key] = {"code": code, "figures": (lines or [None])[-1], "errors": errors[-3000:], "seconds": seconds}
    if RANK == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
