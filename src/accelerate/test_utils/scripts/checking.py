"""Run a list of checks on all ranks of a launch, with a line for each; the first that fails ends the run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate.accelerator import Accelerator


class Skipped(Exception):
    """This setup cannot do what a check is about; the message says why. All ranks raise it, or none."""


@dataclass(frozen=True)
class Check:
    """One thing that must work.

    Attributes:
        name: what is checked, in a word or two.
        run: checks it. Every rank calls it with the Accelerator of the configured setup; it raises where something is wrong.
    """

    name: str
    run: Callable[[Accelerator], None]


def run_checks(checks: Sequence[Check], accelerator: Accelerator) -> None:
    """Run the checks one after the other; the main rank prints a line for each. Every rank calls it.

    A rank that fails ends, and its launcher ends the ranks that wait for it in a collective.

    Args:
        checks: what to run, the same on every rank.
        accelerator: the setup.

    Raises:
        RuntimeError: a check failed on this rank; the message says which, and the cause is what it raised.
    """
    width = len(str(len(checks)))
    for number, check in enumerate(checks, 1):
        accelerator.print(f"[{number:{width}}/{len(checks)}] {check.name} ...", end=" ", flush=True)
        start, outcome = time.perf_counter(), ""
        try:
            check.run(accelerator)
        except Skipped as reason:
            outcome = f"skipped: {reason}"
        except Exception as error:  # whatever a broken setup raises is the finding
            rank, count = accelerator.process_index, accelerator.num_processes
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise RuntimeError(f"The check {check.name!r} failed on rank {rank} of {count}: {line}") from error
        accelerator.wait_for_everyone()
        accelerator.print(outcome or f"ok {time.perf_counter() - start:.2f} s", flush=True)
