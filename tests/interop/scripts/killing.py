"""When a run of a Trainer is killed. Here, because the tests need it without the libraries of the program."""

import pathlib
import time


def wait_and_kill(folder, draw, kill, runs):
    """Kill a run at a random moment: in one of its saves, or at any time after its first step."""
    seen = pathlib.Path(folder)
    lines = seen / "losses_0.txt"
    before = lines.read_text().count("\n") if lines.exists() else 0
    while runs() and not (lines.exists() and lines.read_text().count("\n") > before):
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.4))
    if draw.random() < 0.7:
        delay, amid = draw.uniform(0, 0.06), False
        while runs() and not amid:
            while runs() and not any(seen.glob(".saving_*/checkpoint-*")):
                time.sleep(0.0005)
            time.sleep(delay)
            amid, delay = any(seen.glob(".saving_*")), delay / 2  # that save may have ended: sooner in the next one
    in_save = any(seen.glob(".saving_*"))
    kill()
    return in_save
