"""The barrier of ``save_state`` and ``load_state``: named rounds over the process group's key-value store.

A collective hangs, or mixes up data, if one rank calls something else, or with another path. In a round each rank leaves a note
in the store, and the last one to come writes the outcome that all read. A rank that is missing, or that named another folder, is
found within seconds, and every rank that called raises an error with all call sites; `diagnostics.hang` tells a slow rank, which is
waited for, from one that will never come. No rank blocks in the store: its connection belongs to the whole process, and a save in
the background must not hold up training.

Source:
    https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accelerate import comm
from accelerate.diagnostics import hang
from accelerate.diagnostics.hang import Diagnosis, RankStatus
from accelerate.utils.environment import parse_flag_from_env

logger = logging.getLogger(__name__)

PARTIAL = "ACCELERATE_ALLOW_PARTIAL_SAVE"

# Where a subset of the ranks may save: how long those that call wait for others. Ranks that train together reach a save
# within a step of each other.
PATIENCE = timedelta(seconds=10)

# When a rank begins to ask where the missing ones are, and how long after an answer it asks again.
ASK_AFTER_S, ASK_AGAIN_S = 2.0, 1.0
# The same while ranks write: that takes as long as it takes, and only a rank that is gone ends it.
ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S = 10.0, 5.0

REPORT_AFTER_S = 10.0

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# Waiting ranks look at the store this often a second, all together.
_LOOKS_PER_SECOND = 5000
_MOST_LINES = 16

_subset: frozenset[int] | None = None  # the ranks that saved when not all did, where that is allowed


class CollectiveMisuse(RuntimeError):
    """Not all ranks made the same call: raised on each of those that called, with all call sites."""


class _StoreIsGone(Exception):
    pass


def default_store() -> Any | None:
    """Return the key-value store of the process group, or None when there is no group of several processes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store()


class SaveBarrier:
    """One ``save_state`` or ``load_state`` of all ranks: ``begin``, any number of ``exchange``, ``end``.

    Every rank makes one and calls these in the same order. ``begin`` belongs into the thread of the call; the rest may run
    in another one, while no other barrier of this process begins.

    Args:
        kind: What was called: "save_state" or "load_state".
        place: The path as this rank means it, absolute.
        rank: This process's rank.
        world_size: Number of ranks.
        store: Where notes are left, `default_store`; None for a process that meets nobody.
        local_world_size: Given where each machine has a checkpoint of its own: paths must only agree within a machine.

    Attributes:
        ranks: Those that take part, in ascending order: all, unless a subset may save; without a store, this one.
        name: A name that no other barrier has, the same on all ranks once it has begun.
        local_rank: Given where each machine stages for itself: the number of this process on its machine.
        failed: This rank has failed: it need not wait for those that stand in a collective that it is not going to join.
    """

    def __init__(
        self,
        kind: str,
        place: str,
        rank: int,
        world_size: int,
        store: Any | None,
        local_world_size: int | None = None,
    ) -> None:
        self.kind, self.place, self.rank, self.world_size = kind, place, rank, world_size
        self._origin = store if world_size > 1 else None
        self.ranks = [rank] if self._origin is None else list(range(world_size))
        self._scope = "" if local_world_size is None else socket.gethostname()
        self._store: Any = None if self._origin is None else dist.PrefixStore("accelerate/barrier", store)
        self._number = -1
        self._phases: list[_Round] = []
        self.name = secrets.token_hex(8)
        self.local_rank: int | None = None
        self.failed = False
        self._machines: dict[int, list[Any]] = {}

    @property
    def in_background(self) -> bool:
        """Whether what comes after `begin` may run in a thread of its own."""
        return True

    # What ranks do together

    def begin(self) -> None:
        """Wait until every rank has made the same call.

        Raises:
            CollectiveMisuse: Some rank called something else, with another path, or will not call. Raised on all ranks
                that called, after which they can make the next call together.
        """
        if self._store is None:
            return
        hang.watch(self._origin, self.rank, self.world_size)
        site = hang.call_site()
        note = {"kind": self.kind, "place": self.place, "scope": self._scope, "site": site, "name": self.name}
        if self.local_rank is not None:
            note["machine"] = [socket.gethostname(), self.local_rank]
        try:
            verdict = self._convene(note)
        except _StoreIsGone as error:
            raise CollectiveMisuse(
                f"{self.kind}({self.place!r}) at {site}: the process that holds the ranks' key-value store has ended, so the "
                f"other ranks cannot be met. Call {self.kind} on every rank before any of them ends."
            ) from error.__cause__
        self.ranks = verdict["ranks"]
        if verdict["problem"] is not None:
            self._leave()
            raise CollectiveMisuse(verdict["problem"])
        self.name = verdict["name"]
        self._machines = dict(zip(self.ranks, verdict["machines"], strict=True))
        if len(self.ranks) < self.world_size:
            self._go_on_without_the_rest()

    def leader(self, default: int) -> int:
        """Return the rank that stages for the machine of this one.

        Args:
            default: that rank if ranks are dealt out to machines in blocks, as most launchers do.
        """
        machines = self._machines
        if not machines.get(self.rank):
            return default
        host = machines[self.rank][0]
        if default in machines and machines[default] == [host, 0]:
            return default
        return next((rank for rank in self.ranks if machines[rank] == [host, 0]), default)

    def exchange(self, note: Any) -> list[Any]:
        """Leave a note, and return what everybody left once all have.

        Args:
            note: Anything that JSON can say.

        Returns:
            The notes of ``ranks``, in this order.

        Raises:
            RuntimeError: A rank is gone; raised on all that wait.
        """
        if self._store is None:
            return [note]
        round = _Round(self._store, f"{self._number}/{len(self._phases)}", self.rank, self.ranks)
        former = self._phases[-1]
        self._phases.append(round)
        try:
            verdict = round.hold(note, lambda notes: {"notes": list(notes.values())}, self._missing_writers)
        except _StoreIsGone as error:
            raise RuntimeError(
                f"{self.kind}({self.place!r}): the process that holds the ranks' key-value store has ended."
            ) from error.__cause__
        former.forget_own()
        if "lost" in verdict:
            raise RuntimeError(f"{self.kind}({self.place!r}) did not come to its end. {verdict['lost']}")
        return verdict["notes"]

    def end(
        self,
        problem: BaseException | None,
        act: Callable[[], None] | None = None,
        presiding: bool | None = None,
    ) -> None:
        """Learn whether all ranks succeeded, and if so take the last step.

        Args:
            problem: What went wrong on this rank.
            act: The last step, for the ranks that preside; not taken if anything failed on any rank.
            presiding: Whether this rank presides; the first of ``ranks`` does by default.

        Raises:
            RuntimeError: Something failed on another rank; the message says what and where. What failed on this one is
                raised as it is.
        """
        try:
            self._succeed_together(problem)
            if (self.rank == self.ranks[0] if presiding is None else presiding) and act is not None:
                try:
                    act()
                except BaseException as error:  # the others must hear of it, so that they do not wait for this one
                    problem = error
            self._succeed_together(problem)
        finally:
            self._leave()

    def check(self, problem: BaseException | None) -> None:
        """Go on if all ranks succeeded so far; else this was the end.

        Args:
            problem: What went wrong on this rank.

        Raises:
            RuntimeError: as `end`.
        """
        try:
            self._succeed_together(problem)
        except BaseException:
            self._leave()
            raise

    def _succeed_together(self, problem: BaseException | None) -> None:
        self.failed = self.failed or problem is not None
        try:
            notes = self.exchange(None if problem is None else f"{type(problem).__name__}: {problem}")
        except RuntimeError:
            if problem is None:
                raise
            notes = []
        if problem is not None:
            raise problem
        failed = [f"Rank {rank}: {note}" for rank, note in zip(self.ranks, notes, strict=True) if note is not None]
        if failed:
            raise RuntimeError(f"{self.kind}({self.place!r}) failed on other ranks. {' '.join(failed)}")

    # Beginning

    def _convene(self, note: dict[str, Any]) -> dict[str, Any]:
        """Join the round that is open, until there is a verdict about one that this rank is part of."""
        while True:
            with _store_errors():
                self._number = int(self._store.compare_set("round", "", "0"))
            round = _Round(self._store, f"{self._number}/0", self.rank, self.ranks, self._close_round)
            self._phases = [round]
            judge = self._subset_judge if parse_flag_from_env(PARTIAL) else self._judge_of_begin
            verdict = round.hold(note, self._agree, judge)
            if self.rank in verdict["ranks"]:
                return verdict
            # The round was closed while this rank came in.
            round.forget_own()

    def _close_round(self) -> None:
        # Before anybody hears the verdict: whoever has heard it may begin the next round at once.
        self._store.compare_set("round", str(self._number), str(self._number + 1))

    def _agree(self, notes: dict[int, dict[str, Any]]) -> dict[str, Any]:
        ranks = sorted(notes)
        return {
            "ranks": ranks,
            "problem": disagreement(notes),
            "name": notes[ranks[0]]["name"],
            "machines": [notes[rank].get("machine") for rank in ranks],
        }

    def _judge_of_begin(self, round: "_Round", come: int) -> "_Judge":
        diagnosis = Diagnosis(self._origin, round, self.world_size, come == 1, ASK_AFTER_S, ASK_AGAIN_S)
        return _Begin(self.kind, self.place, diagnosis, lambda: self._number != int(self._store.get("round")))

    def _subset_judge(self, round: "_Round", come: int) -> "_Judge":
        return _Subset(round, self._agree)

    def _missing_writers(self, round: "_Round", come: int) -> "_Judge":
        after, again = (ASK_AFTER_S, ASK_AGAIN_S) if self.failed else (ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S)
        diagnosis = Diagnosis(self._origin, round, self.world_size, come == 1 or self.failed, after, again)
        return _Loss(diagnosis, self.failed)

    def _go_on_without_the_rest(self) -> None:
        global _subset
        if _subset is None and self.rank == self.ranks[0]:  # a script that does this once does it at every save
            rest = [rank for rank in range(self.world_size) if rank not in self.ranks]
            logger.warning(
                "%s was called by rank %s, but not by rank %s. The checkpoint lacks their random states, and the ranks do not "
                "wait for each other. Call %s on every rank: only one of them writes each file.",
                self.kind,
                _numbers(self.ranks),
                _numbers(rest),
                self.kind,
            )
        _subset = frozenset(self.ranks)

    def _leave(self) -> None:
        """Let the last rank that leaves remove the keys, so that they do not pile up in a long run."""
        if self._store is None:
            return
        try:
            if self._store.add(f"{self._number}/left", 1) == len(self.ranks):
                self._phases[-1].forget_notes()
                for round in self._phases:
                    round.forget()
                self._store.delete_key(f"{self._number}/left")
        except (RuntimeError, NotImplementedError) as error:  # a store that cannot delete, or is gone
            logger.debug("Keys of barrier %d stay: %s", self._number, error)


# -- notes ---------------------------------------------------------------------------------------------------------

# Called between two looks: an outcome ends the round before all have come.
_Judge = Callable[[], dict[str, Any] | None]
# An outcome that the others do not learn: this rank is not part of what they decided.
_LEFT_OUT: dict[str, Any] = {"ranks": [], "problem": None}


class _store_errors:
    """Turn what a store raises once its process has ended into `_StoreIsGone`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):
            raise _StoreIsGone from error


class _Round:
    """Some ranks leave a note each, and all learn one outcome, which the last one to come, or a judge before, decides."""

    def __init__(
        self, store: Any, prefix: str, rank: int, ranks: list[int], close: Callable[[], None] | None = None
    ) -> None:
        self.store, self.prefix, self.rank, self.ranks, self._close = store, prefix, rank, ranks, close
        self._longest_pause_s = max(_LONGEST_PAUSE_S, len(ranks) / _LOOKS_PER_SECOND)

    def hold(
        self,
        note: Any,
        agree: Callable[[dict[int, Any]], dict[str, Any]],
        make_judge: Callable[["_Round", int], _Judge],
    ) -> dict[str, Any]:
        """Leave a note and return the outcome; `make_judge` makes what is asked while other ranks are missing."""
        text = json.dumps(note)
        with _store_errors():
            self.store.set(self.key(self.rank), text)
            come = self.store.add(self.key("come"), 1)
            if come == len(self.ranks):
                return self._conclude(agree(self.notes(self.ranks)))
            judge = make_judge(self, come)
            pause = _SHORTEST_PAUSE_S
            while not self.store.check([self.key("outcome")]):
                time.sleep(pause)
                pause = min(1.5 * pause, self._longest_pause_s)
                outcome = judge()
                if outcome is _LEFT_OUT:
                    return outcome
                if outcome is not None:
                    return self._conclude(outcome)
            return json.loads(self.store.get(self.key("outcome")))

    def _conclude(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Make an outcome known, unless another rank was faster; return what holds."""
        if self._close is not None:
            self._close()
        return json.loads(self.store.compare_set(self.key("outcome"), "", json.dumps(outcome)))

    def present(self) -> list[int]:
        """Return who has left a note."""
        return [rank for rank in self.ranks if self.has_come([rank])]

    def has_come(self, ranks: Collection[int]) -> bool:
        """Whether all of some ranks have left a note."""
        return self.store.check([self.key(rank) for rank in ranks])

    def notes(self, ranks: Collection[int]) -> dict[int, Any]:
        """Return the notes of ranks that have left one."""
        keys = [self.key(rank) for rank in ranks]
        texts = self.store.multi_get(keys) if self.store.has_extended_api() else [self.store.get(key) for key in keys]
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}

    def forget_own(self) -> None:
        """Remove this rank's note."""
        self._delete(self.rank)

    def forget_notes(self) -> None:
        """Remove all notes."""
        for rank in self.ranks:
            self._delete(rank)

    def forget(self) -> None:
        """Remove everything but the notes."""
        for name in ("come", "outcome"):
            self._delete(name)

    def key(self, name: Any) -> str:
        """Return the key of a note or of something else that belongs to this round."""
        return f"{self.prefix}/{name}"

    def _delete(self, name: Any) -> None:
        try:
            self.store.delete_key(self.key(name))
        except (RuntimeError, NotImplementedError):  # a store that cannot delete, or is gone
            pass


# -- who is missing ------------------------------------------------------------------------------------------------


class _Begin:
    """Judges whether the ranks that have not begun yet will."""

    def __init__(self, kind: str, place: str, diagnosis: Diagnosis, round_is_over: Callable[[], bool]) -> None:
        self.kind, self.place, self.diagnosis, self.round_is_over = kind, place, diagnosis, round_is_over
        self._next_look = diagnosis.began + ASK_AFTER_S
        self._was_over = False
        self._reported = False

    def __call__(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if now >= self._next_look:
            # Twice in a row: a round ends a moment before its outcome is known.
            self._next_look = now + ASK_AGAIN_S
            over = self.round_is_over()
            if over and self._was_over:
                return _LEFT_OUT
            self._was_over = over
        return self._judge(now) if self.diagnosis.news() else None

    def _judge(self, now: float) -> dict[str, Any] | None:
        round = self.diagnosis.round
        present = round.present()
        missing = [rank for rank in round.ranks if rank not in present]
        notes = round.notes(present)
        problem = disagreement(notes)
        if problem is None and (hopeless := self.diagnosis.gone(missing) or self.diagnosis.stuck(missing)):
            states = {rank: self.diagnosis.observations[rank].latest for rank in missing}
            problem = _missing_call(notes, states, hopeless)
        if problem is not None:
            return {"ranks": present, "problem": problem}
        if missing and not self._reported and now - self.diagnosis.began > REPORT_AFTER_S:
            self._reported = True
            lines = _grouped({rank: str(self.diagnosis.observations[rank].latest) for rank in missing})
            logger.warning("%s(%r) waits for other ranks: %s.", self.kind, self.place, "; ".join(lines))
        return None


class _Subset:
    """Lets those that have come go on without the others, where the user allows it."""

    def __init__(self, round: _Round, agree: Callable[[dict[int, Any]], dict[str, Any]]) -> None:
        self.round, self.agree = round, agree
        self.deadline = time.monotonic() + PATIENCE.total_seconds()

    def __call__(self) -> dict[str, Any] | None:
        if _subset is not None and self.round.has_come(_subset):
            return self.agree(self.round.notes(self.round.present()))
        if time.monotonic() > self.deadline:
            return self.agree(self.round.notes(self.round.present()))
        return None


class _Loss:
    """Judges whether the ranks that others wait for in the middle of a barrier are still alive.

    If the rank that waits has failed, those are lost, too, that wait for it in a collective.
    """

    def __init__(self, diagnosis: Diagnosis, failed: bool = False) -> None:
        self.diagnosis, self.failed = diagnosis, failed

    def __call__(self) -> dict[str, Any] | None:
        if not self.diagnosis.news():
            return None
        present = self.diagnosis.round.present()
        ranks = self.diagnosis.round.ranks
        # With all notes there, whoever should have summed them up is gone.
        missing = [rank for rank in ranks if rank not in present]
        lost = self.diagnosis.gone(missing or ranks) or (
            self.diagnosis.stuck(missing) if self.failed and missing else []
        )
        if not lost:
            return None
        lines = _grouped({rank: str(self.diagnosis.observations[rank].latest) for rank in lost})
        return {"lost": f"The others wait in vain: {'; '.join(lines)}."}


# -- messages ------------------------------------------------------------------------------------------------------


def disagreement(notes: dict[int, dict[str, Any]]) -> str | None:
    """Return what is wrong with the calls of ranks, or None.

    Args:
        notes: of the ranks that have called, from `SaveBarrier.begin`.
    """
    kinds = sorted({note["kind"] for note in notes.values()})
    if len(kinds) > 1:
        return _message(f"Some ranks called {kinds[0]} while others called {kinds[1]}:", notes, {}, kinds[0])
    places: dict[str, set[str]] = {}
    for note in notes.values():
        places.setdefault(note["scope"], set()).add(note["place"])
    if any(len(of_scope) > 1 for of_scope in places.values()):
        return _message(f"{kinds[0]} was called with different paths:", notes, {}, kinds[0])
    return None


def _missing_call(notes: dict[int, dict[str, Any]], missing: dict[int, RankStatus], hopeless: list[int]) -> str:
    kind = next(iter(notes.values()))["kind"]
    title = f"{kind} was called by rank {_numbers(notes)}, but rank {_numbers(hopeless)} will not call it:"
    states = {rank: f"did not call it: it {state}" for rank, state in missing.items()}
    way_out = f" Where some ranks {kind.replace('_', ' ')} alone by design, set {PARTIAL}=1: they then go on without the others."
    return _message(title, notes, states, kind, way_out)


def _message(title: str, notes: dict[int, dict[str, Any]], others: dict[int, str], kind: str, end: str = "") -> str:
    texts = {rank: f"called {note['kind']}({note['place']!r}) at {note['site']}" for rank, note in notes.items()}
    lines = _grouped(dict(sorted({**texts, **others}.items())))
    advice = f"Call {kind} on every rank, with the same path: only one of them writes each file.{end}"
    if kind == "load_state":
        advice = f"Call {kind} on every rank, with the same path.{end}"
    return "\n".join([title, *(f"  {line}" for line in lines), advice])


def _grouped(texts: dict[int, str]) -> list[str]:
    """Return a line for each text, with the ranks it is true for; only the first lines of many."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    lines = [f"rank {_numbers(of_text)} {text}" for text, of_text in ranks.items()]
    surplus = len(lines) - _MOST_LINES
    return lines if surplus <= 0 else [*lines[:_MOST_LINES], f"and {surplus} more such lines"]


def _numbers(ranks: Collection[int]) -> str:
    """Write ranks down shortly.

    Example:
        >>> _numbers([0, 1, 2, 5])
        '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# -- without a store -----------------------------------------------------------------------------------------------


class CollectiveBarrier(SaveBarrier):
    """As `SaveBarrier`, but whoever does not come is waited for as by any collective, and all of it belongs into the thread of the call.

    Args:
        kind, place, rank, world_size: as for `SaveBarrier`.
    """

    def __init__(self, kind: str, place: str, rank: int, world_size: int) -> None:
        super().__init__(kind, place, rank, world_size, None)
        self.ranks = list(range(world_size))

    @property
    def in_background(self) -> bool:
        """Whether what comes after `begin` may run in a thread of its own."""
        return False

    def begin(self) -> None:
        """Wait until every rank has made the same call.

        Raises:
            CollectiveMisuse: some rank called something else, or with another path; raised on all ranks.
        """
        site = hang.call_site()
        note = {"kind": self.kind, "place": self.place, "scope": "", "site": site, "name": self.name}
        notes = dict(enumerate(self.exchange(note)))
        problem = disagreement(notes)
        if problem is not None:
            raise CollectiveMisuse(problem)
        self.name = notes[0]["name"]

    def exchange(self, note: Any) -> list[Any]:
        """Return what every rank says, by rank. All ranks.

        Args:
            note: Anything that JSON can say.
        """
        return comm.current().gather_object(note)
