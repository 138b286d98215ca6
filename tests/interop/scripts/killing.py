"""How runs of a Trainer are started, killed and compared. The tests need this without the libraries of the programs."""

import os
import pathlib
import sys
import time
import traceback


def fork(log, run, *arguments):
    """Run a function in a fork, whose output goes to a file; return its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        run(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def written(folder, rank):
    """Return the losses of each step that a rank wrote; a line that a kill cut off does not count."""
    found = {}
    for line in pathlib.Path(folder, f"losses_{rank}.txt").read_text("utf-8").splitlines(keepends=True):
        step, _, loss = line.partition(" ")
        if loss.endswith("\n"):
            found.setdefault(step, set()).add(loss)
    return found


def wait_and_kill(folder, draw, kill, runs, in_a_save):
    """Kill a run at a random moment after its first step, in one of its saves if asked; return whether it was in one."""
    seen = pathlib.Path(folder)
    lines = seen / "losses_0.txt"
    before = lines.read_text().count("\n") if lines.exists() else 0
    while runs() and not (lines.exists() and lines.read_text().count("\n") > before):
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.2))
    if in_a_save:
        delay, amid = draw.uniform(0, 0.06), False
        while runs() and not amid:
            while runs() and not any(seen.glob(".saving_*/checkpoint-*")):
                time.sleep(0.0005)
            time.sleep(delay)
            amid, delay = any(seen.glob(".saving_*")), 0.0  # where that save has ended: at once in the next one
    in_save = any(seen.glob(".saving_*"))
    kill()
    return in_save
