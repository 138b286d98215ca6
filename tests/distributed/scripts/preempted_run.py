"""A program that is stopped by signals and submitted again until it is done, as a scheduler would do.

    preempted_run.py FOLDER [WORKERS [SAMPLES]]

Each start goes on where the one before was stopped. The last one also trains without interruption, and compares. Rank 0 tells
each micro-batch on standard output, for a test that wants to send a signal there.
"""

import json
import os
import sys
from pathlib import Path

from resume_run import READER_SEED, WRITER_SEED, Case, Job, Log, stir

from accelerate.utils import ProjectConfiguration


def main():
    folder = Path(sys.argv[1])
    case = Case("run", epochs=3, length=int((sys.argv[3:] or ["44"])[0]), workers=int((sys.argv[2:] or ["0"])[0]))
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, save_on_signal=["SIGTERM", "SIGUSR1"])
    goes_on = (folder / "checkpoints").exists()
    job = Job(case, READER_SEED if goes_on else WRITER_SEED, project_config=project)
    if goes_on:
        stir()
    loaded = job.accelerator.load_state(latest=True, missing_ok=True)
    rank = job.accelerator.process_index
    log = Log(folder, "parts", rank)
    told = open(folder / f"told.{rank}", "a", encoding="utf-8")  # noqa: SIM115

    def tell(name):
        if job.accelerator.is_main_process:
            print(f"at {name} pid {os.getpid()}", flush=True)

    try:
        job.train(log, tell, resume=None if loaded is None else "load")
    finally:
        # The other ranks may be gone from the program already, and nobody stops this one for it.
        job.accelerator.wait_for_everyone()
        print("leaving", file=told, flush=True)
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
