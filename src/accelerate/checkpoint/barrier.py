"""The barrier of ``save_state`` and ``load_state``: named rounds over the process group's key-value store.

A collective hangs, or mixes up data, if one rank calls something else, or with another path. In a round each rank
leaves a note in the store, and the last one to come writes the outcome that all read. A rank that is missing, or that
named another folder, is found within seconds, and every rank that called raises an error with all call sites. The
barrier waits for a slow rank, and ends where `diagnostics.hang` finds that a rank will never come. No rank blocks in
the store: its connection belongs to the whole process, and a save in the background must not hold up training.

The keys, under "accelerate/barrier/": "round" is the number of the barrier that is open. Those of a barrier lie under
its number, and those of each of its rounds under the number of the round: a rank's note under the rank, "come", which
counts the notes, and "outcome". "left" counts the ranks that have left the barrier; the last one removes its keys.
"partners/<rank>" are the ranks that took part when this one last took part in a barrier of some ranks only.

Source:
    https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import contextlib
import itertools
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from accelerate import comm
from accelerate.diagnostics import hang
from accelerate.diagnostics.hang import Diagnosis
from accelerate.utils.environment import parse_flag_from_env

logger = logging.getLogger(__name__)

PARTIAL = "ACCELERATE_ALLOW_PARTIAL_SAVE"

# Where a subset of the ranks may save: how long those that call wait for others. Ranks that train together reach a
# save within a step of each other.
PATIENCE_S = 10.0

# When a rank begins to ask where the missing ones are, and how long after an answer it asks again.
ASK_AFTER_S, ASK_AGAIN_S = 2.0, 1.0
# The same while ranks write: that takes as long as it takes, and only a rank that is gone ends it.
ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S = 10.0, 5.0
# How long after its first question a rank reports which ranks it waits for.
REPORT_AFTER_S = 10.0

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# Waiting ranks look at the store this often a second, all together.
_LOOKS_PER_SECOND = 5000
_MOST_LINES = 16
Note = dict[str, Any]
# Makes the outcome of all notes. Makes one while notes are missing, or returns None to wait on.
_Agree = Callable[[dict[int, Note]], Note]
_Judge = Callable[[Diagnosis], Note | None]


class CollectiveMisuse(RuntimeError):
    """Not all ranks made the same call: raised on each of those that called, with all call sites."""


def default_store() -> Any | None:
    """Return the key-value store of the process group, or None when there is no group of several processes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store()


class SaveBarrier:
    """One ``save_state`` or ``load_state`` of all ranks: ``begin``, any number of ``exchange`` and ``check``, ``end``.

    Every rank makes one and calls these in the same order. ``begin`` belongs into the thread of the call; the rest may
    run in another one, while no other barrier of this process begins.

    Args:
        kind: What was called: "save_state" or "load_state".
        place: The path as this rank means it, absolute.
        rank: This process's rank.
        world_size: Number of ranks.
        store: Where notes are left, `default_store`; None for a process that meets no other.
        local_world_size: Given where each machine has a checkpoint of its own: paths must only agree within a machine.

    Attributes:
        ranks: Those that take part, in ascending order: all, unless a subset may save; without a store, this one.
        name: A name that no other barrier has, the same on all ranks once it has begun.
        local_rank: Given where each machine stages for itself: the number of this process on its machine.
        failed: This rank has failed: it need not wait for those that stand in a collective that it will not join.
        in_background: Whether what comes after `begin` may run in a thread of its own.
    """

    in_background = True

    def __init__(
        self, kind: str, place: str, rank: int, world_size: int, store: Any | None, local_world_size: int | None = None
    ) -> None:
        self.kind, self.place, self.rank, self.world_size = kind, place, rank, world_size
        self.name = secrets.token_hex(8)
        self.local_rank: int | None = None
        self.failed = False
        self._origin = store if world_size > 1 else None
        self.ranks = [rank] if self._origin is None else list(range(world_size))
        self._scope = "" if local_world_size is None else socket.gethostname()
        self._machines: dict[int, list[Any] | None] = {}
        self._site, self._reported = "", False
        # The keys of all barriers, and from `begin` on those of this one and of the round that it is in.
        self._store: Any = None if self._origin is None else dist.PrefixStore("accelerate/barrier", store)
        self._keys = self._round = self._store
        self._number = self._round_number = -1

    # What ranks do together

    def begin(self) -> None:
        """Wait until every rank has made the same call.

        Raises:
            CollectiveMisuse: Some rank called something else, with another path, or will not call. Raised on all ranks
                that called, after which they can make the next call together.
        """
        hang.watch(self._origin, self.rank, self.world_size)
        self._site = hang.call_site()
        note = {"kind": self.kind, "place": self.place, "scope": self._scope, "site": self._site, "name": self.name}
        note["machine"] = None if self.local_rank is None else [socket.gethostname(), self.local_rank]
        outcome = self._convene(note)
        self.ranks = outcome["ranks"]
        if outcome["problem"] is not None:
            self._leave()
            raise CollectiveMisuse(outcome["problem"])
        self.name = outcome["name"]
        self._machines = dict(zip(self.ranks, outcome["machines"], strict=True))

    def leader(self, default: int) -> int:
        """Return the rank that stages for the machine of this one: its first that takes part as number 0 there.

        Args:
            default: That rank if ranks are dealt out to machines in blocks, as most launchers do.

        Returns:
            The rank; the default where no rank has said which machine it is on.
        """
        machine = self._machines.get(self.rank)
        if machine is None:
            return default
        first = [rank for rank in self.ranks if self._machines[rank] == [machine[0], 0]]
        return default if default in first or not first else first[0]

    def exchange(self, note: Any) -> list[Any]:
        """Leave a note, and return what all ranks left once they have.

        Args:
            note: Anything that JSON can say.

        Returns:
            The notes of ``ranks``, in this order.

        Raises:
            RuntimeError: A rank is gone; raised on all that wait.
        """
        if self._store is None:
            return [note]
        ask = (ASK_AFTER_S, ASK_AGAIN_S) if self.failed else (ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S)
        try:
            outcome = self._hold({"note": note}, lambda notes: {"notes": notes}, self._judge_exchange, *ask)
        except RuntimeError as error:
            raise RuntimeError(self._no_store()) from error
        if "lost" in outcome:
            raise RuntimeError(f"{self.kind}({self.place!r}) did not come to its end. {outcome['lost']}")
        return [left["note"] for left in outcome["notes"].values()]

    def check(self, problem: BaseException | None) -> None:
        """Go on if all ranks succeeded so far; else this was the end.

        Args:
            problem: What went wrong on this rank.

        Raises:
            RuntimeError: As `end`.
        """
        try:
            self._succeed_together(problem)
        except BaseException:
            self._leave()
            raise

    def end(
        self, problem: BaseException | None, act: Callable[[], None] | None = None, presiding: bool | None = None
    ) -> None:
        """Learn whether all ranks succeeded, and if so take the last step.

        Args:
            problem: What went wrong on this rank.
            act: The last step, for the ranks that preside; not taken if anything failed on any rank. Every rank gives
                one, or none does.
            presiding: Whether this rank presides; the first of ``ranks`` does by default.

        Raises:
            RuntimeError: Something failed on another rank; the message says what and where. What failed on this one is
                raised as it is.
        """
        try:
            self._succeed_together(problem)
            if act is not None:
                if presiding or (presiding is None and self.rank == self.ranks[0]):
                    try:
                        act()
                    except (
                        BaseException
                    ) as error:  # the others must learn of it, so that they do not wait for this one
                        problem = error
                self._succeed_together(problem)
        finally:
            self._leave()

    def _succeed_together(self, problem: BaseException | None) -> None:
        self.failed = self.failed or problem is not None
        try:
            notes = self.exchange(None if problem is None else f"{type(problem).__name__}: {problem}")
        except RuntimeError:
            if problem is None:
                raise
        if problem is not None:
            raise problem
        failed = [f"Rank {rank}: {note}" for rank, note in zip(self.ranks, notes, strict=True) if note is not None]
        if failed:
            raise RuntimeError(f"{self.kind}({self.place!r}) failed on other ranks. {' '.join(failed)}")

    # Rounds

    def _convene(self, note: Note) -> Note:
        """Join the barrier that is open, until there is an outcome of one that this rank is part of."""
        if self._store is None:
            return _agreed({self.rank: note})
        after_s = 0.0 if parse_flag_from_env(PARTIAL) else ASK_AFTER_S
        try:
            while True:
                self._number, self._round_number = int(self._store.compare_set("round", "", "0")), -1
                self._keys = dist.PrefixStore(str(self._number), self._store)
                outcome = self._hold(note, _agreed, self._judge_begin, after_s, ASK_AGAIN_S)
                # Before this rank goes on, because it may begin the next barrier at once.
                self._store.compare_set("round", str(self._number), str(self._number + 1))
                if self.rank in outcome["ranks"]:
                    break
                # The others decided while this rank came in. If they have also left, the rest of the keys is its own.
                with contextlib.suppress(RuntimeError):  # a store that cannot delete
                    self._remove([f"0/{self.rank}", *([] if outcome["ranks"] else ["0/come", "0/outcome"])])
            if len(outcome["ranks"]) < self.world_size and outcome["problem"] is None:
                self._go_on_without_the_rest(outcome["ranks"])
        except RuntimeError as error:
            raise CollectiveMisuse(self._no_store()) from error
        return outcome

    def _hold(self, note: Note, agree: _Agree, judge: _Judge, after_s: float, again_s: float) -> Note:
        """Leave a note in the next round, and return the outcome: what the last rank to come makes of all notes.

        From `after_s` on a judge may decide before, at each look. The first rank to come asks where those missing are.
        """
        text = json.dumps(note)  # where it fails, this rank has not come to the round
        self._round_number += 1
        self._round = store = dist.PrefixStore(str(self._round_number), self._keys)
        store.set(str(self.rank), text)
        come = store.add("come", 1)
        notes = self._notes() if come == len(self.ranks) else {}
        outcome = agree(notes) if len(notes) == len(self.ranks) else None
        began, pause_s, diagnosis = time.monotonic(), _SHORTEST_PAUSE_S, None
        while outcome is None:
            if (known := _read(store, "outcome")) is not None:
                return known
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, max(_LONGEST_PAUSE_S, len(self.ranks) / _LOOKS_PER_SECOND))
            if time.monotonic() - began >= after_s:
                asks = come == 1 or self.failed
                diagnosis = diagnosis or Diagnosis(self._origin, self, self.world_size, asks, 0.0, again_s)
                outcome = judge(diagnosis)
        # What another rank has decided meanwhile holds.
        return json.loads(store.compare_set("outcome", "", json.dumps(outcome)))

    def _notes(self) -> dict[int, Note]:
        """Return the notes of this round that are there, in the order of the ranks."""
        keys = [str(rank) for rank in self.ranks]
        if self._round.has_extended_api() and self._round.check(keys):
            notes = map(json.loads, self._round.multi_get(keys))  # one request, however many ranks
        else:
            notes = [_read(self._round, key) for key in keys]
        return {rank: note for rank, note in zip(self.ranks, notes, strict=True) if note is not None}

    def _leave(self) -> None:
        """Remove keys that no rank needs any longer, so that they do not pile up in a long run."""
        if self._store is None:
            return
        # All have come to the last round, so all have the outcomes before it; but some may still read its notes.
        rounds = range(self._round_number + 1)
        keys = [f"{number}/{self.rank}" for number in rounds[:-1]]
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or whose process has ended
            if self._keys.add("left", 1) == len(self.ranks):
                keys += [f"{self._round_number}/{rank}" for rank in self.ranks]
                keys += [f"{number}/{name}" for number in rounds for name in ("come", "outcome")] + ["left"]
            self._remove(keys)

    def _remove(self, keys: list[str]) -> None:
        for key in keys:
            self._keys.delete_key(key)

    def _no_store(self) -> str:
        return (
            f"{self.kind}({self.place!r}) at {self._site}: the process that holds the ranks' key-value store has ended, "
            f"so the other ranks cannot be met. Call {self.kind} on every rank before any of them ends."
        )

    # Who is missing

    def _judge_begin(self, diagnosis: Diagnosis) -> Note | None:
        """Decide a barrier that not all ranks have begun, if those that are missing will not."""
        # The outcome is written before the number changes: where it is not there then, the keys have been removed.
        if int(self._store.get("round")) != self._number and not self._round.check(["outcome"]):
            return {"ranks": [], "problem": None}
        if parse_flag_from_env(PARTIAL):
            partners = _read(self._store, f"partners/{self.rank}")
            complete = partners and self._round.check([str(rank) for rank in partners])
            late = time.monotonic() - diagnosis.began >= PATIENCE_S
            return _agreed(self._notes()) if complete or late else None
        if not diagnosis.news():
            return None
        notes = self._notes()
        states = {rank: str(diagnosis.observations[rank].latest) for rank in self.ranks if rank not in notes}
        problem = _disagreement(notes)
        if problem is None and (hopeless := diagnosis.gone(states) or diagnosis.stuck(list(states))):
            problem = _never_called(notes, states, hopeless)
        if problem is not None:
            return {"ranks": list(notes), "problem": problem}
        if states and not self._reported and time.monotonic() - diagnosis.began > REPORT_AFTER_S:
            self._reported = True
            logger.warning("%s(%r) waits for other ranks: %s.", self.kind, self.place, "; ".join(_lines(states)))
        return None

    def _judge_exchange(self, diagnosis: Diagnosis) -> Note | None:
        """End an exchange if a missing rank is gone, or waits in a collective for this rank, which has failed."""
        if not diagnosis.news():
            return None
        missing = [rank for rank in self.ranks if not self._round.check([str(rank)])]
        # With all notes there, the rank that should have summed them up is gone.
        lost = diagnosis.gone(missing or self.ranks) or (diagnosis.stuck(missing) if self.failed and missing else [])
        lines = _lines({rank: str(diagnosis.observations[rank].latest) for rank in lost})
        return {"lost": f"The others wait in vain: {'; '.join(lines)}."} if lost else None

    def _go_on_without_the_rest(self, ranks: list[int]) -> None:
        """Warn the first time, as a script that does this does it at every save, and do not wait for others again."""
        if self.rank == ranks[0] and not _read(self._store, f"partners/{self.rank}"):
            called, rest = _numbers(ranks), _numbers(set(range(self.world_size)) - set(ranks))
            logger.warning(
                f"{self.kind} was called by rank {called}, but not by rank {rest}. The checkpoint lacks their random "
                f"states, and the ranks do not wait for each other. Call {self.kind} on every rank: only one of them "
                "writes each file."
            )
        self._store.set(f"partners/{self.rank}", json.dumps(ranks))


def _read(store: Any, key: str) -> Any | None:
    """Return what a key holds, or None. `get` would wait for a key that another rank has just removed."""
    return json.loads(store.compare_set(key, "null", "null"))


# -- messages ------------------------------------------------------------------------------------------------------


def _agreed(notes: dict[int, Note]) -> Note:
    """Return the outcome of a `begin` that these ranks take part in."""
    return {
        "ranks": list(notes),
        "problem": _disagreement(notes),
        "name": next(iter(notes.values()))["name"],
        "machines": [note["machine"] for note in notes.values()],
    }


def _disagreement(notes: dict[int, Note]) -> str | None:
    """Return what is wrong with the calls of ranks, or None."""
    kinds = sorted({note["kind"] for note in notes.values()})
    places = {(note["scope"], note["place"]) for note in notes.values()}
    if len(kinds) > 1:
        return _message(f"Some ranks called {kinds[0]} while others called {kinds[1]}:", notes)
    if len(places) > len({scope for scope, _ in places}):
        return _message(f"{kinds[0]} was called with different paths:", notes)
    return None


def _never_called(notes: dict[int, Note], states: dict[int, str], hopeless: list[int]) -> str:
    kind = next(iter(notes.values()))["kind"]
    title = f"{kind} was called by rank {_numbers(notes)}, but rank {_numbers(hopeless)} will not call it:"
    others = {rank: f"did not call it: it {state}" for rank, state in states.items()}
    alone = f"Where some ranks {kind.replace('_', ' ')} alone by design, set {PARTIAL}=1"
    return f"{_message(title, notes, others)} {alone}: they then go on without the others."


def _message(title: str, notes: dict[int, Note], others: dict[int, str] | None = None) -> str:
    texts = {rank: f"called {note['kind']}({note['place']!r}) at {note['site']}" for rank, note in notes.items()}
    lines = _lines(dict(sorted((texts | (others or {})).items())))
    kind = min(note["kind"] for note in notes.values())
    reason = "" if kind == "load_state" else ": only one of them writes each file"
    return "\n  ".join([title, *lines]) + f"\nCall {kind} on every rank, with the same path{reason}."


def _lines(texts: dict[int, str]) -> list[str]:
    """Return a line for each text, with the ranks it is true for; only the first lines of many."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    lines = [f"rank {_numbers(of_text)} {text}" for text, of_text in ranks.items()]
    surplus = len(lines) - _MOST_LINES
    return lines if surplus <= 0 else [*lines[:_MOST_LINES], f"and {surplus} more such lines"]


def _numbers(ranks: Collection[int]) -> str:
    """Write ranks down shortly: "0-2, 5"."""
    # Within a run of neighbours, a rank and its place among all grow alike.
    runs = itertools.groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


# -- without a store -----------------------------------------------------------------------------------------------


class CollectiveBarrier(SaveBarrier):
    """A `SaveBarrier` by collectives: it waits for a missing rank as they do, and belongs into the thread of the call.

    Args:
        kind: What was called: "save_state" or "load_state".
        place: The path as this rank means it, absolute.
        rank: This process's rank.
        world_size: Number of ranks.
    """

    in_background = False

    def __init__(self, kind: str, place: str, rank: int, world_size: int) -> None:
        super().__init__(kind, place, rank, world_size, None)
        self.ranks = list(range(world_size))

    def _convene(self, note: Note) -> Note:
        return _agreed(dict(enumerate(self.exchange(note))))

    def exchange(self, note: Any) -> list[Any]:
        """Return what every rank says, by rank. All ranks.

        Args:
            note: Anything that JSON can say.

        Returns:
            The notes of all ranks.
        """
        return comm.current().gather_object(note)
