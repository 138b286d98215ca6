"""Whether a rank that others wait for is slow, waits for them in turn, or is gone.

A wrong guess ends a run, so the evidence must be strong: a rank has ended or was killed; or it stands still in a collective
that we have not joined. Whoever computes, reads or sleeps is waited for.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from accelerate.runtime.whereabouts import Question, Whereabouts

# One of the waiting ranks asks for all of them. The others look as often whether it still does.
TAKE_OVER_S = 15.0

# How long a missing rank must stand still in a collective that we have not joined before it is taken for stuck,
STILL_S = 0.9
# ... where the group's backend does not count collectives, so that it may as well wait for a third rank,
STILL_UNCOUNTED_S = 5.0
# ... and where all missing ranks wait, but for nothing that we know of.
STILL_TOGETHER_S = 15.0
# How long a rank may leave questions unanswered if its process cannot be seen from here.
SILENCE_S = 60.0

# These backends count collectives alone; others count point-to-point operations as well, which not all ranks share.
_EXACT_COUNTERS = ("nccl:", "xccl:")
# So who waits in one of these has counted it, and need not wait for us.
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


class Gathering(Protocol):
    """What a search knows of those who wait.

    Attributes:
        store: Where they leave notes.
        ranks: All that are to come.
    """

    store: Any
    ranks: list[int]

    def key(self, name: Any) -> str:
        """Return the key of something that belongs to this gathering."""
        ...


@dataclass
class Trace:
    """What has been seen of a missing rank."""

    heard: float
    still_since: float
    latest: Whereabouts

    def add(self, now: float, latest: Whereabouts) -> None:
        """Note a new answer, or that there is none."""
        if latest.answered:
            self.heard = now
        before = self.latest
        if not latest.answered or (latest.position, latest.counters) != (before.position, before.counters):
            self.still_since = now
        self.latest = latest


class Search:
    """Finds out where missing ranks are. One of those that wait asks; the others take over should it stop.

    Args:
        origin: The process group's store.
        gathering: Whose ranks are missing.
        world_size: Number of ranks of the run.
        leads: Whether this rank asks from the beginning.
        after: Seconds until the first question.
        again: Seconds from an answer to the next question.
    """

    def __init__(
        self, origin: Any, gathering: Gathering, world_size: int, leads: bool, after: float, again: float
    ) -> None:
        self.gathering, self._origin, self._world_size, self._leads = gathering, origin, world_size, leads
        self.began = time.monotonic()
        self._next = self.began + after + (0 if leads else TAKE_OVER_S)
        self._again = again
        self._asks = 0
        self._question: Question | None = None
        self.traces = {rank: Trace(self.began, self.began, Whereabouts(rank)) for rank in gathering.ranks}

    def news(self) -> bool:
        """Go on with the search; say whether there are new answers. Does not wait."""
        now = time.monotonic()
        if now < self._next or not (self._leads or self._take_over(now)):
            return False
        if self._question is None:
            self.gathering.store.add(self.gathering.key("asks"), 1)
            # All of them: to see who is ahead, one has to know where those are that wait here.
            self._question = Question(self._origin, self.gathering.ranks, self._world_size)
        answers = self._question.answers()
        if answers is None:
            return False
        now = time.monotonic()
        for rank, answer in answers.items():
            self.traces[rank].add(now, answer)
        self._question, self._next = None, now + self._again
        return True

    def _take_over(self, now: float) -> bool:
        asks = self.gathering.store.add(self.gathering.key("asks"), 0)
        self._leads = asks == self._asks
        self._asks, self._next = asks, now + (0 if self._leads else TAKE_OVER_S)
        return self._leads

    def gone(self, ranks: Collection[int]) -> list[int]:
        """Return which of some ranks can never come, or have not been heard of for too long."""
        now = time.monotonic()
        found = []
        for trace in (self.traces[rank] for rank in ranks):
            silent = now - trace.heard > SILENCE_S and not trace.latest.alive
            if trace.latest.gone or silent:
                found.append(trace.latest.rank)
        return found

    def stuck(self, missing: list[int]) -> list[int]:
        """Return which of the missing ranks wait for something that only happens if we go on."""
        here = [trace.latest.counters for rank, trace in self.traces.items() if rank not in missing]
        found = [rank for rank in missing if self._is_stuck(self.traces[rank], here)]
        if not found and all(self._waits(self.traces[rank], STILL_TOGETHER_S) for rank in missing):
            found = missing
        return found

    def _is_stuck(self, trace: Trace, here: list[dict[str, int]]) -> bool:
        if time.monotonic() - trace.still_since < STILL_S:
            return False
        if any(trace.latest.ahead_of(_exact(counters)) for counters in here):
            return True  # wherever it stands: on a GPU one waits for a collective in whatever reads its result
        ahead = [answer for counters in here if (answer := trace.latest.ahead_of(counters)) is not None]
        if ahead:
            return any(ahead) and trace.latest.waits and not trace.latest.inside.endswith(_POINT_TO_POINT)
        return self._waits(trace, STILL_UNCOUNTED_S)

    @staticmethod
    def _waits(trace: Trace, seconds: float) -> bool:
        return trace.latest.waits and time.monotonic() - trace.still_since >= seconds


def _exact(counters: dict[str, int]) -> dict[str, int]:
    return {group: count for group, count in counters.items() if group.startswith(_EXACT_COUNTERS)}
