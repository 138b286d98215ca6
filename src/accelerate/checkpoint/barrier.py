"""The barrier of ``save_state`` and ``load_state``: named rounds over the process group's key-value store.

A collective hangs, or mixes up data, if one rank calls something else, or with another path. In a round each rank
leaves a note in the store, and the last one to come writes the outcome that all read. A rank that is missing, or that
named another folder, is found within seconds, and every rank that called raises an error with all call sites. The
barrier waits for a slow rank, and ends where `diagnostics.hang` finds that a rank will never come. No rank blocks in
the store: its connection belongs to the whole process, and a save in the background must not hold up training.

The keys, under "accelerate/barrier/": "round" is the number of the barrier that is open. Those of a barrier lie under
its number, and those of each of its rounds under the number of the round: a rank's note under the rank, "come", which
counts the notes, and "outcome". "left" counts the ranks that have left the barrier; the last one removes its keys.

Source:
    https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import contextlib
import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelerate import comm
from accelerate.diagnostics import hang
from accelerate.diagnostics.hang import Diagnosis
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run

if TYPE_CHECKING:
    from accelerate.checkpoint.storage import CheckpointStorage

logger = logging.getLogger(__name__)

# When a rank begins to ask where the missing ones are, and how long after an answer it asks again.
ASK_AFTER_S, ASK_AGAIN_S = 2.0, 1.0
# The same while ranks write: that takes as long as it takes, and only a rank that is gone ends it.
ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S = 10.0, 5.0
# How long after its first question a rank reports which ranks it waits for.
REPORT_AFTER_S = 10.0

# A waiting rank looks at the store more seldom the longer it waits, so that it loses a tenth of its time at most; all
# ranks together never look more often than this.
_LONGEST_PAUSE_S = 0.05
_LOOKS_PER_SECOND = 20_000
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
    return torch_private.default_store()


@dataclass(frozen=True)
class Group:
    """The ranks of a checkpoint, as one of them sees them.

    Attributes:
        each_node: every node has a file system, and a checkpoint, of its own.
        shared: all ranks see what one of them stages.
    """

    rank: int
    world_size: int
    local_rank: int
    each_node: bool
    shared: bool

    @classmethod
    def of(cls, accelerator: Run, storage: "CheckpointStorage") -> "Group":
        """Return the group of an Accelerator for a checkpoint that lies in `storage`."""
        # A storage that is no file system is the same for all nodes.
        each_node = accelerator.project_configuration.save_on_each_node and storage.shared
        ranks = accelerator.process_index, accelerator.num_processes, accelerator.local_process_index
        return cls(*ranks, each_node, storage.shared and not each_node)


class SaveBarrier:
    """One ``save_state`` or ``load_state`` of all ranks: ``begin``, any number of ``exchange``, ``leave``.

    Every rank makes one and calls these in the same order. ``begin`` belongs into the thread of the call; the rest may
    run in another one, if ``in_background``, while no other barrier of this process begins. Several ranks without a
    store meet by collectives, which wait without limit.

    Attributes:
        ranks: Those that leave the barrier together: all, or those that called where others never will.
        name: A name that no other barrier has, the same on all ranks once it has begun.
    """

    def __init__(self, kind: str, location: str, group: Group, store: Any | None) -> None:
        self.kind, self.location, self.rank, self.world_size = kind, location, group.rank, group.world_size
        self.ranks = list(range(self.world_size))
        self.name = os.urandom(8).hex()
        self.in_background = store is not None or self.world_size == 1
        self._group = group
        self._machines: list[list[Any]] = []
        self._site, self._reported, self._failed, self._given_up = "", False, False, False
        self._origin = store if self.world_size > 1 else None
        # The keys of all barriers, and from `begin` on those of this one and of the round that it is in.
        self._store: Any = None if self._origin is None else dist.PrefixStore("accelerate/barrier", store)
        self._keys = self._round = self._store
        self._number = self._round_number = -1

    # What ranks do together

    def begin(self) -> None:
        """Wait until every rank has made the same call; CollectiveMisuse on all that called if some rank will not."""
        hang.watch(self._origin, self.rank, self.world_size)
        self._site = hang.call_site()
        machine = socket.gethostname()
        note = {"kind": self.kind, "location": self.location, "site": self._site, "name": self.name}
        note["scope"] = machine if self._group.each_node else ""
        note["machine"] = [machine, self._group.local_rank]
        outcome = self._convene(note)
        if outcome["problem"] is not None:
            self.ranks = outcome["ranks"]
            self.leave()
            raise CollectiveMisuse(outcome["problem"])
        self.name = outcome["name"]
        self._machines = outcome["machines"]

    def leader(self) -> int:
        """Return the rank that stages for this one: rank 0, or where machines stage apart the number 0 of this one's machine."""
        if self._group.shared:
            return 0
        # Most launchers give each machine a block of ranks; those of others are known by its name, which others may have, too.
        usual, (machine, _) = self.rank - self._group.local_rank, self._machines[self.rank]
        first = [rank for rank in self.ranks if self._machines[rank] == [machine, 0]]
        return usual if usual in first else (first or [self.rank])[0]

    def exchange(self, note: Any, problem: BaseException | None = None) -> list[Any]:
        """Return the JSON notes of all ranks, in their order; where a rank has failed or is gone, raise on all.

        The rank with a `problem` raises that as it is, the others a RuntimeError that says where and what is wrong.
        """
        self._failed = self._failed or problem is not None
        notes = []
        try:
            notes = self._gather([note, None if problem is None else f"{type(problem).__name__}: {problem}"])
        except RuntimeError as error:
            if problem is None or self._given_up:  # what failed here then is that the others have left
                raise error from problem
        failed = [f"Rank {rank}: {text}" for rank, (_, text) in zip(self.ranks, notes, strict=False) if text]
        if failed:
            self.leave()
        if problem is not None:
            raise problem
        if failed:
            raise RuntimeError(f"{self.kind}({self.location!r}) failed on other ranks. {' '.join(failed)}")
        return [left for left, _ in notes]

    def leave(self) -> None:
        """End the barrier, after the last exchange; the last rank to leave removes its keys, which would pile up in a long run."""
        if self._store is None:
            return
        names, rounds = [*self.ranks, "come", "outcome"], range(self._round_number + 1)
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or whose process has ended
            if self._keys.add("left", 1) == len(self.ranks):
                for key in [*(f"{number}/{name}" for number in rounds for name in names), "left"]:
                    self._keys.delete_key(key)

    def _gather(self, note: Any) -> list[Any]:
        """Return the notes of all ranks, which they leave now."""
        if self._store is None:
            # The communicator of a single process is not asked: the run may have reset its state meanwhile.
            return [note] if self.world_size == 1 else comm.current().gather_object(note)
        ask = (ASK_AFTER_S, ASK_AGAIN_S) if self._failed else (ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S)
        try:
            outcome = self._hold({"note": note}, lambda notes: {"notes": notes}, self._judge_exchange, *ask)
        except RuntimeError as error:
            raise RuntimeError(self._no_store()) from error
        if "lost" in outcome:
            self._given_up = self.rank in outcome["ranks"]
            raise RuntimeError(f"{self.kind}({self.location!r}) did not come to its end. {outcome['lost']}")
        return [left["note"] for left in outcome["notes"].values()]

    # Rounds

    def _convene(self, note: Note) -> Note:
        """Join the barrier that is open, until there is an outcome of one that this rank is part of."""
        if self._store is None:
            return _agreed(dict(enumerate(self._gather(note))))
        try:
            while True:
                self._number, self._round_number = int(self._store.compare_set("round", "", "0")), -1
                self._keys = dist.PrefixStore(str(self._number), self._store)
                outcome = self._hold(note, _agreed, self._judge_begin, ASK_AFTER_S, ASK_AGAIN_S)
                # Before this rank goes on, because it may begin the next barrier at once.
                self._store.compare_set("round", str(self._number), str(self._number + 1))
                if self.rank in outcome["ranks"]:
                    return outcome
                # The others decided while this rank came in. If they have also left, the rest of the keys is its own.
                with contextlib.suppress(RuntimeError):  # a store that cannot delete
                    for key in (f"0/{self.rank}", *([] if outcome["ranks"] else ["0/come", "0/outcome"])):
                        self._keys.delete_key(key)
        except RuntimeError as error:
            raise CollectiveMisuse(self._no_store()) from error

    def _hold(self, note: Note, agree: _Agree, judge: _Judge, after_s: float, again_s: float) -> Note:
        """Leave a note in the next round, and return what the last rank to come makes of all notes.

        From `after_s` on a judge may decide before, at each look. The first rank to come asks where those missing are.
        """
        text = json.dumps(note)  # where it fails, this rank has not come to the round
        self._round_number += 1
        self._round = store = dist.PrefixStore(str(self._round_number), self._keys)
        store.set(str(self.rank), text)
        come = store.add("come", 1)
        notes = self._notes() if come == len(self.ranks) else {}
        outcome = agree(notes) if len(notes) == len(self.ranks) else None
        shortest_s = len(self.ranks) / _LOOKS_PER_SECOND
        began, waited_s, diagnosis = time.monotonic(), 0.0, None
        while outcome is None:
            if (known := _read(store, "outcome")) is not None:
                return known
            time.sleep(max(shortest_s, min(waited_s / 10, _LONGEST_PAUSE_S)))
            waited_s = time.monotonic() - began
            if waited_s >= after_s:
                asks = come == 1 or self._failed
                diagnosis = diagnosis or Diagnosis(self._origin, self.ranks, self.world_size, asks, again_s)
                outcome = judge(diagnosis)
        # What another rank has decided meanwhile holds.
        return json.loads(store.compare_set("outcome", "", json.dumps(outcome)))

    def _notes(self) -> dict[int, Note]:
        """Return the notes of this round that are there, in the order of the ranks."""
        notes = {rank: _read(self._round, str(rank)) for rank in self.ranks}
        return {rank: note for rank, note in notes.items() if note is not None}

    def _no_store(self) -> str:
        return (
            f"{self.kind}({self.location!r}) at {self._site}: the process that holds the ranks' key-value store has ended, "
            f"so the other ranks cannot be met. Call {self.kind} on every rank before any of them ends."
        )

    # Who is missing

    def _judge_begin(self, diagnosis: Diagnosis) -> Note | None:
        """Decide a barrier that not all ranks have begun, if those that are missing will not."""
        # The outcome is written before the number changes: where it is not there then, the keys have been removed.
        if int(self._store.get("round")) != self._number and not self._round.check(["outcome"]):
            return {"ranks": [], "problem": None}
        if not diagnosis.news():
            return None
        notes = self._notes()
        states = {rank: str(diagnosis.latest[rank]) for rank in self.ranks if rank not in notes}
        problem = _disagreement(notes)
        if problem is None and (hopeless := diagnosis.gone(states) or diagnosis.stuck(list(states))):
            problem = _never_called(notes, states, hopeless)
        if problem is not None:
            return {"ranks": list(notes), "problem": problem}
        if states and not self._reported and time.monotonic() - diagnosis.began > REPORT_AFTER_S:
            self._reported = True
            logger.warning("%s(%r) waits for other ranks: %s.", self.kind, self.location, "; ".join(_lines(states)))
        return None

    def _judge_exchange(self, diagnosis: Diagnosis) -> Note | None:
        """End an exchange if a missing rank is gone, or waits in a collective for this rank, which has failed."""
        if not diagnosis.news():
            return None
        missing = [rank for rank in self.ranks if not self._round.check([str(rank)])]
        # With all notes there, the rank that should have summed them up is gone.
        lost = diagnosis.gone(missing or self.ranks) or (diagnosis.stuck(missing) if self._failed and missing else [])
        lines = _lines({rank: str(diagnosis.latest[rank]) for rank in lost})
        return {"lost": f"The others wait in vain: {'; '.join(lines)}.", "ranks": lost} if lost else None


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
    locations = {(note["scope"], note["location"]) for note in notes.values()}
    if len(kinds) > 1:
        return _message(f"Some ranks called {kinds[0]} while others called {kinds[1]}:", notes)
    if len(locations) > len({scope for scope, _ in locations}):
        return _message(f"{kinds[0]} was called with different paths:", notes)
    return None


def _never_called(notes: dict[int, Note], states: dict[int, str], hopeless: list[int]) -> str:
    kind = next(iter(notes.values()))["kind"]
    title = f"{kind} was called by rank {_numbers(notes)}, but rank {_numbers(hopeless)} will not call it:"
    return _message(title, notes, {rank: f"did not call it: it {state}" for rank, state in states.items()})


def _message(title: str, notes: dict[int, Note], others: dict[int, str] | None = None) -> str:
    texts = {rank: f"called {note['kind']}({note['location']!r}) at {note['site']}" for rank, note in notes.items()}
    lines = _lines(dict(sorted((texts | (others or {})).items())))
    kind = min(note["kind"] for note in notes.values())
    return "\n  ".join([title, *lines]) + f"\nCall {kind} on every rank, with the same path."


def _lines(texts: dict[int, str]) -> list[str]:
    """Return a line for each text, with the ranks it is true for."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [f"rank {_numbers(of_text)} {text}" for text, of_text in ranks.items()]


def _numbers(ranks: Collection[int]) -> str:
    """Write ranks down shortly: "0-2, 5"."""
    # Within a run of neighbours, a rank and its place among all grow alike.
    runs = itertools.groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
