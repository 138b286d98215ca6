"""A program that is stopped by signals and submitted again until it is done, as a scheduler would do.

    preempted_run.py FOLDER HOLD

Each start continues where the one before was stopped. After HOLD micro-batches (0 for never) rank 0 prints it on standard output, and
waits for its signal. A start that comes to the end also trains without interruption, and compares.
"""

import json
import os
import sys
import time
from pathlib import Path

from resume_run import READER_SEED, WRITER_SEED, Case, Job, Log, stir

from accelerate.extensions.preemption import watch
from accelerate.extensions.preemption.watch import Preempted
from accelerate.utils import ProjectConfiguration


def wait_for_the_end_of(rank: Path) -> None:
    """Wait until the process whose number a file holds has ended; the launcher collects it."""
    end = time.monotonic() + 30
    while time.monotonic() < end and Path("/proc", rank.read_text()).exists():
        time.sleep(0.01)


def main():
    folder, hold = Path(sys.argv[1]), int(sys.argv[2])
    case = Case("run", length=44, workers=2)
    signals = ["SIGTERM", "SIGUSR1"]
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, save_on_signal=signals)
    goes_on = (folder / "checkpoints").exists()
    job = Job(case, READER_SEED if goes_on else WRITER_SEED, project_config=project)
    if goes_on:
        stir()
    loaded = job.accelerator.load_state(latest=True, missing_ok=True)
    rank = job.accelerator.process_index
    log = Log(folder, "parts", rank)
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    done = 0

    def wait_for_signal(name):
        nonlocal done
        done += name.split("-")[1].isdigit()
        if rank == 0 and done == hold:
            print("holding", flush=True)
            while not watch._installed.received:
                time.sleep(0.001)

    try:
        job.train(log, wait_for_signal, resume=None if loaded is None else "load")
    except Preempted:
        job.accelerator.wait_for_everyone()
        if rank == 0 and job.accelerator.num_processes > 1 and sys.platform == "linux":
            # Rank 1 has ended with 75 by then, and the launcher does not stop this one for it.
            wait_for_the_end_of(Path(folder, "pid.1"))
        Path(folder, f"left.{rank}").touch()
        raise
    whole = Log(folder, "whole", rank)
    Job(case, WRITER_SEED).train(whole)
    parts, expected = (
        [json.loads(line) for line in Path(folder, f"{name}.rank{rank}.jsonl").read_text("utf-8").splitlines() if line]
        for name in ("parts", "whole")
    )
    assert parts == expected, next((p, w) for p, w in zip(parts, expected, strict=False) if p != w)
    job.accelerator.print("equal", len(parts))


if __name__ == "__main__":
    main()
