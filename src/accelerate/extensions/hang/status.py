"""A rank's status, the question of another rank over the process group's key-value store, and the conclusions from the answers."""

import json
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from accelerate.base._warn import printable
from accelerate.extensions.hang import threads
from accelerate.runtime.peers import MissingRanks

PREFIX = "accelerate/hang"
# Seconds between two looks at the store; a large run looks less often, so that its one store sees 2,000 requests a second.
INTERVAL_S = 0.5
_PER_SECOND = 2000
# A thread that was in one place for this long is assumed to hang there.
STILL_S = 1.0
_ANSWER_S = 0.15  # duration of an answer


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank, as it reports it.

    Attributes:
        ended: whether it has reported the end of its program.
        alive: whether its process exists; None if that cannot be seen from here, as on another machine.
        site: the innermost line outside of torch and this library; `inside` is the function called there.
        counters: how many operations the rank has started in each of its process groups.
        still_s: for how many seconds the thread has not moved, by the rank's own watcher.
        operation: the exchange that it has started and not finished; `number` and `shapes` describe it.
        module: the part of a model that it computes, or whose weights it gathers.
        stack: the user's lines, the innermost first.
        note: another reason why it does not come.
    """

    rank: int
    answered: bool = False
    ended: bool = False
    alive: bool | None = None
    site: str = ""
    inside: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    still_s: float = 0.0
    operation: str = ""
    number: int | None = None
    shapes: str = ""
    module: str = ""
    stack: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def gone(self) -> bool:
        """Whether the rank can never come: its program is over, or its process was killed."""
        return self.ended or self.alive is False

    @property
    def stands(self) -> bool:
        """Whether the thread does not move."""
        return self.answered and self.still_s >= STILL_S

    @property
    def waits(self) -> bool:
        """Whether the thread hangs in an exchange with other ranks."""
        return bool(self.operation) and self.still_s >= STILL_S

    @property
    def blocked(self) -> bool:
        """Whether it hangs in the function that it has called, without an exchange that others can finish."""
        return self.waits and self.inside.rpartition(" > ")[2].startswith(threads.WAITING_IN)

    def ahead_of(self, other: dict[str, int]) -> bool | None:
        """Return whether the rank has started an operation that the other has not; None if no group counts."""
        common = self.counters.keys() & other.keys()
        return any(self.counters[group] > other[group] for group in common) if common else None

    def __str__(self) -> str:
        if self.ended:
            return "has ended" + (f" with {printable(self.note, 300)}" if self.note else "")
        if self.alive is False:
            return "was killed: its process is gone"
        if not self.answered:
            return "gives no answer" + (f", but its process exists ({self.note})" if self.alive else "")
        inside = f", in {self.inside}" if self.inside else ""
        return f"is at {printable(self.site)}{printable(inside)}" + (
            ", and waits for other ranks there" if self.blocked else ""
        )


def interval(world_size: int) -> float:
    """Return the seconds between two looks at the store in a run of so many ranks."""
    return max(INTERVAL_S, world_size / _PER_SECOND)


def said_by(store: Any, rank: int, question: int = 0) -> RankStatus:
    """Return a rank's status in the store; answers count from the question of number `question` on."""
    record = json.loads(store.compare_set(f"rank/{rank}", "{}", "{}"))
    if "ended" in record:
        return RankStatus(rank, ended=True, note=record["ended"])
    if record.get("question", -1) >= question:
        return RankStatus(**record["answer"])
    if "process" not in record:
        return RankStatus(rank)
    alive = threads.exists(record["process"])
    return RankStatus(rank, alive=alive, note=threads.state(record["process"]["pid"]) if alive else "")


class Question:
    """One question to all ranks: where are you? One rank asks it and reads the answers of `ranks`."""

    def __init__(self, store: Any, ranks: Collection[int], world_size: int) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self._number = self._store.add("asked", 1)
        self._ranks = ranks
        self._pause = interval(world_size) / 5
        self._next = time.monotonic() + self._pause
        # A look, the answer, and as much again for a busy machine.
        self._deadline = time.monotonic() + 2 * (interval(world_size) + _ANSWER_S)

    def answers(self) -> dict[int, RankStatus] | None:
        """Return the ranks' answers, or None as long as some may still answer. Does not wait."""
        current_time = time.monotonic()
        if current_time < self._next:
            return None
        self._next, late = current_time + self._pause, current_time >= self._deadline
        come = 0 if late else self._store.add(f"answers/{self._number}", 0) + self._store.add("left", 0)
        if come < len(self._ranks) and not late:
            return None
        answers = {rank: said_by(self._store, rank, self._number) for rank in self._ranks}
        return answers if late or all(status.answered or status.gone for status in answers.values()) else None


# -- slow, waiting in turn, or gone ---------------------------------------------------------------------------------
#
# A wrong guess ends a run, so the evidence must be strong: a rank has ended or was killed; or it hangs in a collective that
# the waiting ranks have not joined. A rank that computes, reads or sleeps is waited for.

# How long a missing rank must hang (`STILL_S`) in a collective that we have not joined before it counts as stuck:
# ... where the group's backend does not count collectives, so that it may as well wait for a third rank,
STILL_UNCOUNTED_S = 5.0
# ... and where all missing ranks wait, but for nothing that we know of.
STILL_TOGETHER_S = 15.0
# How long a rank may leave questions unanswered if its process cannot be seen from here.
SILENCE_S = 60.0

# These backends count only collectives; others also count point-to-point operations, which not all ranks share.
_EXACT_COUNTERS = ("nccl:", "xccl:")
# So who waits in one of these has counted it, and need not wait for us.
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


class Diagnosis(MissingRanks):
    """Finds the positions of missing ranks. It asks all of them, again after `again` seconds."""

    def __init__(self, origin: Any, ranks: Collection[int], world_size: int, again: float) -> None:
        super().__init__(ranks, again, float("inf"))
        self._origin, self._ranks, self._world_size = origin, ranks, world_size
        self._question: Question | None = None
        self.latest = {rank: RankStatus(rank) for rank in ranks}
        self._heard = dict.fromkeys(ranks, self.began)

    def news(self) -> bool:
        """Continue the diagnosis; return whether there are new answers. Does not wait."""
        current_time = time.monotonic()
        if current_time < self._next:
            return False
        if self._question is None:
            # All of them: to see who is ahead, one has to know where those are that wait here.
            self._question = Question(self._origin, self._ranks, self._world_size)
        answers = self._question.answers()
        if answers is None:
            return False
        self.note(answers.values())
        self._question, self._next = None, time.monotonic() + self._again_s
        return True

    def ask_now(self) -> None:
        """Let the next question come at once."""
        self._next = time.monotonic()

    def note(self, answers: Iterable[RankStatus]) -> None:
        """Note what ranks have answered, or that they have not."""
        for answer in answers:
            self.latest[answer.rank] = answer
            if answer.answered:
                self._heard[answer.rank] = time.monotonic()

    def gone(self, ranks: Collection[int]) -> list[int]:
        """Return which of some ranks can never come, or have not been heard of for too long."""
        long_ago = time.monotonic() - SILENCE_S
        silent = [rank for rank in ranks if self._heard[rank] < long_ago and not self.latest[rank].alive]
        return [rank for rank in ranks if self.latest[rank].gone or rank in silent]

    def stuck(self, missing: list[int]) -> list[int]:
        """Return which of the missing ranks wait for something that only happens if we continue."""
        counters = [status.counters for rank, status in self.latest.items() if rank not in missing]
        late = [self.latest[rank] for rank in missing]
        together = all(status.blocked and status.still_s >= STILL_TOGETHER_S for status in late)
        return [status.rank for status in late if self._is_stuck(status, counters)] or missing * together

    @staticmethod
    def _is_stuck(status: RankStatus, waiting_counters: list[dict[str, int]]) -> bool:
        if status.still_s < STILL_S:
            return False
        for counters in waiting_counters:
            exact = {group: count for group, count in counters.items() if group.startswith(_EXACT_COUNTERS)}
            if status.ahead_of(exact):
                return True  # at any position: on a GPU a thread waits for a collective when it reads the result
        ahead = [answer for counters in waiting_counters if (answer := status.ahead_of(counters)) is not None]
        if ahead:
            return any(ahead) and status.blocked and not status.inside.endswith(_POINT_TO_POINT)
        return status.blocked and status.still_s >= STILL_UNCOUNTED_S
