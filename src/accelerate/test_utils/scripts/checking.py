"""Run a list of checks on all ranks of a launch, with a line for each, and tell which ranks failed and which never came back."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from accelerate.accelerator import Accelerator
from accelerate.checkpoint.barrier import default_store

# How long the others may take to come out of a check after one rank has failed in it.
GRACE_S = 5.0


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


@dataclass(frozen=True)
class Outcome:
    """What became of a check on one rank.

    Attributes:
        error: what went wrong, in a line; empty if nothing did.
        where: the traceback of that.
        skipped: why it was not checked; empty if it was.
    """

    error: str = ""
    where: str = ""
    skipped: str = ""


def run_checks(checks: Sequence[Check], accelerator: Accelerator) -> None:
    """Run the checks one after the other; the main rank prints a line for each. Every rank calls it.

    A rank that fails does not leave the others waiting for it in a collective: the ranks meet in the key-value store of the
    process group after each check, and those that are not there within seconds of a failure are reported as such.

    Args:
        checks: what to run, the same on every rank.
        accelerator: the setup.

    Raises:
        SystemExit: with status 1, on every rank that came back, after the first check that failed on any rank.
    """
    board = _Board(accelerator)
    width = len(str(len(checks)))
    for number, check in enumerate(checks, 1):
        accelerator.print(f"[{number:{width}}/{len(checks)}] {check.name} ...", end=" ", flush=True)
        start = time.perf_counter()
        mine = _attempt(check, accelerator)
        outcomes = board.meet(number, mine)
        if len(outcomes) < board.count or any(outcome.error for outcome in outcomes.values()):
            _fail(board, check, outcomes)
        seconds = time.perf_counter() - start
        accelerator.print(f"skipped: {mine.skipped}" if mine.skipped else f"ok {seconds:.2f} s", flush=True)


def _attempt(check: Check, accelerator: Accelerator) -> Outcome:
    try:
        check.run(accelerator)
    except Skipped as reason:
        return Outcome(skipped=str(reason))
    except Exception as error:  # whatever a broken setup raises is the finding
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(error=line, where=traceback.format_exc())
    return Outcome()


class _Board:
    """Where the ranks write what became of a check, and read what became of it elsewhere."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        self._store: Any = default_store()
        self.sees_all = self._store is not None or self.count == 1

    def meet(self, number: int, outcome: Outcome) -> dict[int, Outcome]:
        """Return the outcomes by rank; some are missing if a rank failed and they did not come in time."""
        if self._store is None:
            # One process, or a kind of group without a store: a rank that fails ends, and its launcher ends the others.
            return {self.rank: outcome} if outcome.error else dict.fromkeys(range(self.count), outcome)
        prefix = f"accelerate_test/{number}"
        self._store.set(f"{prefix}/{self.rank}", json.dumps(asdict(outcome)))
        if outcome.error:
            self._store.set(f"{prefix}/failed", "1")
        self._store.add(f"{prefix}/done", 1)
        deadline, pause = None, 0.001
        while self._store.add(f"{prefix}/done", 0) < self.count:
            if deadline is None and self._store.check([f"{prefix}/failed"]):
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        if not self._store.check([f"{prefix}/failed"]):
            return dict.fromkeys(range(self.count), outcome)
        keys = {rank: f"{prefix}/{rank}" for rank in range(self.count)}
        return {r: Outcome(**json.loads(self._store.get(key))) for r, key in keys.items() if self._store.check([key])}

    def may_tell(self, present: Sequence[int]) -> bool:
        """Tell whether this rank is the one that reports; any other waits until that is done."""
        if self._store is None:
            return True
        told = "accelerate_test/told"
        if self.rank == min(present) and self._store.add("accelerate_test/tellers", 1) == 1:
            return True
        deadline = time.monotonic() + 2 * GRACE_S
        while not self._store.check([told]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return False

    def has_told(self) -> None:
        """Let the other ranks end."""
        if self._store is not None:
            self._store.set("accelerate_test/told", "1")


def _fail(board: _Board, check: Check, outcomes: dict[int, Outcome]) -> NoReturn:
    if board.may_tell(sorted(outcomes)):
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error}
        missing = [rank for rank in range(board.count) if rank not in outcomes] if board.sees_all else []
        ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
        if board.rank == 0:
            print("FAILED", flush=True)
        lines = [f"The check {check.name!r} failed on {ranks} of {board.count}."]
        lines += [f"  rank {rank}: {outcome.error}" for rank, outcome in failed.items()]
        lines += [
            f"  rank {rank}: still in the check {GRACE_S:.0f} s later; it may wait for another rank"
            for rank in missing
        ]
        first = next(iter(failed))
        lines += [f"Where, on rank {first}:", failed[first].where.rstrip()]
        print("\n" + "\n".join(lines), file=sys.stderr, flush=True)
        board.has_told()
    raise SystemExit(1)
