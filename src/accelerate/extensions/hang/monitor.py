"""The report of ranks that hang: which rank waits for which. One of the waiting ranks prints it.

Each rank's watcher looks at its training thread (`Monitor.look`). If that has been in one exchange for
`ACCELERATE_HANG_REPORT_AFTER` seconds, the first rank to see it asks all others for their positions, and reports them.
`ACCELERATE_HANG_ABORT_AFTER` ends all ranks, after a report. A running rank is slow, and the report claims nothing about it.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from accelerate.base._warn import printable
from accelerate.comm.torch_dist import operations_started
from accelerate.extensions.hang import threads
from accelerate.extensions.hang.leaving import write_report
from accelerate.extensions.hang.status import PREFIX, Diagnosis, RankStatus, said_by
from accelerate.runtime.call_site import call_site
from accelerate.runtime.rendezvous import connection

logger = logging.getLogger(__name__)

REPORT_AFTER, ABORT_AFTER = "ACCELERATE_HANG_REPORT_AFTER", "ACCELERATE_HANG_ABORT_AFTER"
_SHOWN = 4  # stacks in a report
LONGEST_REPORT = 50_000  # characters


def limits() -> tuple[float, float]:
    """Return after how many seconds ranks that wait report, and when they end; infinite is never."""
    seconds_of = []
    for name, default in ((REPORT_AFTER, "10"), (ABORT_AFTER, "0")):
        text = os.environ.get(name, "").strip() or default
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise ValueError(f"{name} is {text!r}; write seconds, such as 30, or 0 for never.")
        seconds_of.append(seconds or float("inf"))
    return min(seconds_of), seconds_of[1]


@contextlib.contextmanager
def joining(store: Any, rank: int, world_size: int) -> Iterator[None]:
    """Report once, from one rank, which ranks have not come to the process group that is made inside. Every rank."""
    after, _ = limits()
    over, site = threading.Event(), call_site()
    with contextlib.suppress(RuntimeError):  # torch's FakeStore keeps nothing
        dist.PrefixStore(PREFIX, store).set(f"come/{rank}", "")

    def report() -> None:
        if over.wait(after):
            return
        try:
            keys = dist.PrefixStore(PREFIX, connection(store))
            if keys.compare_set("waits", "", str(rank)).decode() != str(rank):
                return  # another rank reports
            come = {other for other in range(world_size) if keys.check([f"come/{other}"])}
            missing = [other for other in range(world_size) if other not in come]
            if missing and not over.is_set():
                logger.warning(
                    "Slow: %s waited for %.0f s at %s for %s to join the process group. `accelerate stacks` shows where a rank of this "
                    "machine is.",
                    f"{_names(come)} {'have' if len(come) > 1 else 'has'}",
                    *(after, site, _names(missing)),
                )
        except Exception as error:  # the store is gone: the training thread has the error
            logger.debug("Rank %d cannot say who is missing: %s", rank, error)

    if world_size > 1 and after < threading.TIMEOUT_MAX:
        threading.Thread(target=report, name="accelerate-joining", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Monitor:
    """Sees whether this rank's training thread hangs, and reports the reason if this rank reports for all waiting ones."""

    def __init__(self, rank: int, world_size: int, limits: tuple[float, float]) -> None:
        self.rank, self.world_size = rank, world_size
        self.report_after, self.abort_after = limits
        self._place, self._counters = "", {}
        self._since = time.monotonic()
        self._waits: bool | None = None
        self._diagnosis: Diagnosis | None = None
        self._unsure, self._reported = False, set[str]()

    @property
    def still_s(self) -> float:
        """For how many seconds the thread has stood still."""
        return time.monotonic() - self._since

    def look(self, frame: FrameType | None, native: int | None) -> None:
        """Note where the thread is now; nowhere if it has ended."""
        place = threads.position(frame) if frame is not None else ""
        if place and place == self._place:
            counters = operations_started()
            # On a GPU a thread that waits keeps its core busy.
            spins = any(group.startswith(("nccl:", "xccl:")) for group in counters)
            if counters == self._counters and (spins or threads.sleeps(native)):
                if self._waits is None and self.still_s >= self.report_after:
                    self._waits = bool(threads.waits_in(frame))
                return
            self._counters = counters
        self._place, self._since, self._waits = place, time.monotonic(), None

    def go_on(self, store: Any) -> bool:
        """Ask and report, if this rank is the one to do so; return whether all ranks must end. Does not wait."""
        keys = dist.PrefixStore(PREFIX, store)
        if not self._waits:
            if self._diagnosis is not None:
                keys.compare_set("reporter", str(self.rank), "")
                write_report("")
                self._diagnosis, self._reported = None, set()
            return False
        if self._diagnosis is None:
            if not self._elected(keys):
                return False
            again = min(self.report_after, 30.0)
            self._diagnosis = Diagnosis(store, range(self.world_size), self.world_size, again)
        if self._diagnosis.news():
            answers = self._diagnosis.latest
            # On a busy machine an answer may come late: once more, before a rank is said to give none.
            self._unsure = not self._unsure and any(not (other.answered or other.gone) for other in answers.values())
            if self._unsure:
                self._diagnosis.ask_now()
            else:
                self._report(Finding(answers), keys)
        return bool(self._reported) and self.still_s >= self.abort_after

    def _elected(self, keys: Any) -> bool:
        """Whether this rank asks for all: the first one to wait, or another one when that has gone."""
        me = str(self.rank)
        chosen = keys.compare_set("reporter", "", me).decode()
        if chosen != me and said_by(keys, int(chosen)).gone:
            chosen = keys.compare_set("reporter", chosen, me).decode()
        return chosen == me

    def _report(self, finding: "Finding", keys: Any) -> None:
        if finding.waiting and finding.key not in self._reported:
            self._reported.add(finding.key)
            text = printable(str(finding), LONGEST_REPORT)
            keys.set("report", text)
            write_report(text)
            logger.warning("%s", text)


@dataclass(frozen=True)
class Finding:
    """The conclusion from the answers of all ranks."""

    answers: Mapping[int, RankStatus]

    @property
    def waiting(self) -> list[tuple[str, list[int]]]:
        """The ranks that wait in an exchange, by which and where; most ranks first."""
        places: dict[str, list[int]] = {}
        for rank, status in sorted(self.answers.items()):
            if status.waits:
                places.setdefault(f"{_exchange(status)} at {status.site}", []).append(rank)
        return sorted(places.items(), key=lambda item: -len(item[1]))

    @property
    def _others(self) -> dict[int, RankStatus]:
        return {rank: status for rank, status in self.answers.items() if not status.waits}

    @property
    def key(self) -> str:
        """The content of a report, for comparison with the next one."""
        # A slow rank may pause in many places.
        others = [(rank, status.ended, status.still_s > 5 and status.site) for rank, status in self._others.items()]
        return repr((self.waiting, others))

    def __str__(self) -> str:
        (place, ranks), *elsewhere = self.waiting
        for_s = f"for {self.answers[ranks[0]].still_s:.0f} s"
        missing = [*self._others, *(rank for _, group in elsewhere for rank in group)]
        if not missing:
            return f"Slow: all ranks have been in {place} {for_s}. The network is slow, or a connection was lost."
        cause, certain = self._cause()
        waited = f"{'have' if len(ranks) > 1 else 'has'} waited {for_s} in {place} for {_names(missing)}"
        lines = [f"{'Hang' if certain else 'Slow'}: {_names(ranks)} {waited}."]
        for where, group in elsewhere:
            lines.append(f"  {_names(group)} {'are' if len(group) > 1 else 'is'} in {where} instead")
        lines += [f"  rank {rank} {_where(status)}" for rank, status in self._others.items()]
        for rank in missing[:_SHOWN]:
            if self.answers[rank].stands:
                lines.append(f"  rank {rank}, innermost line first:")
                lines += [f"    {line}" for line in self.answers[rank].stack]
        return "\n".join([*lines, f"  {'Likely cause: ' if certain else ''}{cause}."])

    def _cause(self) -> tuple[str, bool]:
        """Return why the missing ranks do not come, and whether that is likely; for a running rank the reason is unknown."""
        late = {rank: status for rank, status in self._others.items() if not status.gone}
        for rank, status in self.answers.items():
            if "exception" in status.note and status.waits:
                return f"rank {rank} {status.note}, and skipped the exchange that the others wait in", True
            if rank in late and status.note and not status.answered:
                return f"the process of rank {rank} is {status.note}", "stopped" in status.note
            if rank in late and "workers" in status.note and status.stands:
                return f"rank {rank} {status.note}", any(word in status.note for word in ("gone", "stopped"))
        if late:
            still = (
                any(status.stands for status in late.values())
                * ", or held by something else: a lock, a sleep, an input, a disk"
            )
            return f"{_names(late).capitalize()} {'are' if len(late) > 1 else 'is'} slow{still}", False
        if self._others:
            return f"{_names(self._others)} ended before the others: an early exit, or data that was at its end", True
        return self._unlike(), True

    def _unlike(self) -> str:
        """Return why ranks that all wait do not wait in the same exchange."""
        statuses = self.answers.values()
        if len({(status.operation, status.site) for status in statuses}) == 1:
            if len({status.number for status in statuses}) == 1:
                return "the ranks pass different shapes"
            return "some ranks have made this call more often: unequal batches, or a branch on rank"
        places, past = {rank: _line(status.site) for rank, status in self.answers.items()}, ""
        if len({function for _, function in places.values()}) == 1 and len(set(places.values())) > 1:
            first = min(line for line, _ in places.values())
            past = f"{_names(rank for rank in places if places[rank][0] > first)} went past the line of the others: "
        modules: dict[str, list[int]] = {}
        for rank, status in self.answers.items():
            modules.setdefault(status.module, []).append(rank)
        inside = [f"{_names(ranks)} in {module!r}" for module, ranks in modules.items() if module]
        unused, declare = "", "declare the module with accelerator.conditional"
        if inside:
            unused = f", or a module that not every rank calls ({', '.join(inside)}; {declare})"
        elif any("backward" in status.inside for status in statuses):
            unused = f", or a parameter that not every rank's loss uses ({declare})"
        if len(inside) > 1:
            return f"{past}a branch in the model{unused}"
        return f"{past}a branch on rank, another order of calls, unequal batches, an early exit of a loop{unused}"


def _line(site: str) -> tuple[int, str]:
    """Split `file:line in function` into the line and the rest."""
    file, _, rest = site.partition(":")
    line, _, function = rest.partition(" in ")
    return int(line) if line.isdigit() else 0, f"{file} {function}"


def _exchange(status: RankStatus) -> str:
    number = f" no. {status.number}" if status.number is not None else ""
    shapes = f" of {status.shapes}" if status.shapes else ""
    called = status.inside.partition(" > ")[0]
    called = "" if called.startswith("torch.distributed") else called
    module = f" of module {status.module!r}" if status.module else ""
    return f"{status.operation}{number}{shapes}{module}{f' ({called})' if called else ''}"


def _where(status: RankStatus) -> str:
    if not status.answered:
        return str(status)
    inside = f", in {status.inside}" if status.inside else ""
    note = f"; it {status.note}" if status.note else ""
    how = f"has stood still for {status.still_s:.0f} s" if status.stands else "runs"
    return f"{how} at {status.site}{inside}{note}"


def _names(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
