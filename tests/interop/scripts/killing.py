"""When a run of a Trainer is killed. Here, because the tests need it without the libraries of the program."""

import pathlib
import time


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
