"""What all ranks of a ``save_state`` or ``load_state`` do together, in rounds over the process group's key-value store.

A rank sends and receives a few small values in a round, however many ranks there are, and uses no collective, so a save in
the background does not disturb the training. In a round each rank leaves a note and adds itself to a counter. The last rank to
come writes the outcome that the others wait for. The first one looks for missing ranks after a while, the second one a little
later. Where a rank will never come, they write the outcome, and every rank that came raises an error.

The keys, under "accelerate/ranks/":

- ``arrived`` counts the ranks that have come to a meeting since the group began. So it numbers the meetings: each takes as
  many arrivals as there are ranks. Who ends a meeting early moves the counter to the next meeting.
- ``call/RANK``, ``note/RANK/0`` and ``note/RANK/1`` are the last notes of a rank.
- ``leads/MACHINE`` is the rank that stages files there, where machines stage separately.
- ``N/first``, ``N/come``, ``N/outcome/R`` and ``N/left`` belong to meeting N and its round R. They are removed when they are read.

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
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelerate import comm
from accelerate.base._warn import printable
from accelerate.checkpoint.manifest import first_of, save_name
from accelerate.runtime import peers, torch_private
from accelerate.runtime.call_site import call_site
from accelerate.runtime.peers import MissingRanks
from accelerate.runtime.rendezvous import connection
from accelerate.runtime.run import Run

if TYPE_CHECKING:
    from accelerate.checkpoint.storage import CheckpointStorage

logger = logging.getLogger(__name__)

# When a rank begins to ask where the missing ones are, and how long after an answer it asks again.
ASK_AFTER_S, ASK_AGAIN_S = 2.0, 1.0
# The same while ranks write: only a rank that is gone ends a round then, however long it takes.
ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S = 10.0, 5.0
# The deputy of the rank that asks is so many times slower.
_DEPUTY = 3
# How long after its first question a rank reports which ranks it waits for.
REPORT_AFTER_S = 10.0
# A rank that looks for the outcome again and again spends at most a tenth of its time on that. The others wait in the store.
_LONGEST_PAUSE_S, _FOREVER = 0.05, timedelta(days=20)

# The store's server answers all ranks, and closes a connection above 8 MiB.
LARGEST_VALUE = 64 << 10
# How many problems, or groups of ranks, an error names, and how many bytes of each.
_MOST, _LONGEST = 30, 1000

# What a rank adds to the counter of a round, which has 64 bits: itself, and whether it has a flag or an error.
_FLAG, _FAILED = 1 << 20, 1 << 40

Note = dict[str, Any]


class CollectiveMisuse(RuntimeError):
    """Not all ranks made the same call: raised on each of those that called, with all call sites."""


def default_store() -> Any | None:
    """Return the key-value store of the process group, or None when there is no group of several processes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return torch_private.default_store()


def _limit_s() -> float:
    """Return for how long ranks wait for others of which nothing is known: as long as in a collective."""
    timeout = torch_private.live_timeout() if dist.is_initialized() else None
    return (timeout or dist.default_pg_timeout).total_seconds()


@dataclass(frozen=True)
class Problem:
    """Why ranks cannot continue.

    Attributes:
        level: How it ranks among the problems of all ranks, from 1 on; the highest one counts.
        error: What this rank may raise.
        lines: The problems of other ranks with this level, each with its rank; nothing for a problem of this rank.
    """

    level: int
    error: BaseException
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Group:
    """The ranks of a checkpoint, as one of them sees them.

    Attributes:
        each_node: every node has a file system, and a checkpoint, of its own.
        one_folder: rank 0 stages the folder into which all ranks save.
    """

    rank: int
    world_size: int
    local_rank: int
    each_node: bool
    one_folder: bool

    @classmethod
    def of(cls, accelerator: Run, storage: "CheckpointStorage") -> "Group":
        """Return the group of an Accelerator for a checkpoint in `storage`."""
        # A storage that is no file system is the same for all nodes.
        each_node = accelerator.project_configuration.save_on_each_node and storage.shared
        ranks = accelerator.process_index, accelerator.num_processes, accelerator.local_process_index
        return cls(*ranks, each_node, storage.shared and not each_node)


class Ranks:
    """The ranks that make one call together: `agree`, then any of the other verbs in the same order on every rank, then `leave`.

    An error that one rank passes to a verb is raised on all: on that rank as it is, on the others as a RuntimeError that names
    it. `agree` belongs into the thread of the call. The rest may run in another thread if `can_run_in_thread`, as long as this
    process makes no other such call. Without a store the ranks gather by collectives, which wait without limit.

    Attributes:
        name: A name that no other call has, the same on all ranks; from `agree` on.
    """

    def __init__(self, group: Group, store: Any | None) -> None:
        self.group, self.name = group, ""
        self.can_run_in_thread = store is not None or group.world_size == 1
        self._origin: Any = store if group.world_size > 1 else None
        self._store: Any = None  # the connection on which this rank waits
        self._keys: Any = None  # those of this meeting
        self._kind = self._location = self._site = self._note_key = ""
        self._number, self._round = 0, -1
        self._leader = 0 if group.one_folder else group.rank
        self._has_left = False

    def agree(self, kind: str, location: str) -> None:
        """Wait until every rank has made the same call with the same path.

        Collective: call on every rank.

        Raises:
            CollectiveMisuse: A rank made another call, or will never make this one.
        """
        group, machine = self.group, socket.gethostname()
        peers.joined(self._origin, group.rank, group.world_size)
        self._kind, self._location, self._site = kind, location, call_site()
        # Machines with separate checkpoints may have separate paths.
        call: Note = {
            "kind": kind,
            "location": location,
            "site": self._site,
            "scope": machine if group.each_node else "",
        }
        call |= {"machine": machine, "leads": group.local_rank == 0, "name": save_name()}
        try:
            outcome = self._outcome(call, self._origin is not None and self._arrive(call))
            if outcome["misuse"] is None:
                self.name = outcome["name"]
                if not group.one_folder:
                    self._leader = self._machine_leader(machine, outcome)
        except RuntimeError as error:
            raise CollectiveMisuse(self._store_problem(error)) from error
        if outcome["misuse"] is not None:
            self.leave()
            raise CollectiveMisuse(outcome["misuse"])

    def any(self, flag: bool, error: BaseException | None = None) -> bool:
        """Return whether the flag of any rank is true.

        Collective: call on every rank.
        """
        return self.count(flag, error) > 0

    def count(self, flag: bool, error: BaseException | None = None) -> int:
        """Return on how many ranks the flag is true.

        Collective: call on every rank.
        """
        flags: int = self._meet(None, bool(flag), error)["flags"]
        return flags

    def first_error(self, error: BaseException | None) -> None:
        """Raise an error if any rank has one.

        Collective: call on every rank.
        """
        self._meet(None, error=error)

    def worst(self, problem: Problem | None) -> Problem | None:
        """Return the problem with the highest level: this rank's if it has that level, else one that names the ranks with it.

        Collective: call on every rank.

        Raises:
            RuntimeError: A rank will never come, or the store failed.
        """
        level, error = (0, None) if problem is None else (problem.level, problem.error)
        outcome = self._meet(None, error=error, level=level, raises=False)
        if outcome["error"] is None or outcome["level"] == level:
            return problem
        failure = RuntimeError(f"{self._kind}({self._location!r}) {outcome['error']}")
        return Problem(outcome["level"], failure, outcome["lines"])

    def share(self, value: Any = None, root: int = 0, error: BaseException | None = None) -> Any:
        """Return the small JSON value of rank `root`; ranks may name different ones.

        Collective: call on every rank.
        """
        text = json.dumps(value if self.group.rank == root else None)  # a value that fails here has not been sent
        if len(text) > LARGEST_VALUE:
            raise ValueError(
                f"Ranks share {LARGEST_VALUE} bytes at most, but got {len(text)}. Share the path of a file."
            )
        value = json.loads(text)
        outcome = self._meet(value, error=error)
        if root == self.group.rank:
            return value
        notes = outcome.get("notes") or {root: self._note(root)}
        return None if notes[root] is None else notes[root]["value"]

    def smallest(self, number: int, error: BaseException | None = None) -> int:
        """Return the smallest of the numbers of all ranks.

        Collective: call on every rank.
        """
        if self._store is None:
            numbers: list[int] = [note["value"] for note in self._meet(number, error=error)["notes"].values()]
            return min(numbers)
        key, smallest = f"smallest/{self._round + 1}", ""
        while (smallest := self._keys.compare_set(key, smallest, str(number)).decode()) and int(smallest) > number:
            continue  # seldom more than once: ranks have the same number, as a rule
        self.first_error(error)
        return int(self._keys.get(key))

    def leader(self) -> int:
        """Return the rank that stages for this one: rank 0, or where each machine stages the first one of this machine."""
        return self._leader

    def leave(self) -> None:
        """End the call, after the last round, once on each rank. The last rank to leave removes the keys.

        Collective: call on every rank.
        """
        if self._has_left:  # after an error; a second arrival would stand for a rank that still reads the keys
            return
        self._has_left = True
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or whose process has ended
            if self._store is not None and self._keys.add("left", 1) == self.group.world_size:
                numbers = [f"smallest/{number}" for number in range(1, self._round + 1)]
                for key in ("left", "first", "come", f"outcome/{self._round}", *numbers):
                    self._keys.delete_key(key)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _arrive(self, call: Note) -> bool:
        """Come to the next meeting; return whether this rank's call differs from that of the first rank."""
        store, size = dist.PrefixStore("accelerate/ranks", self._origin), self.group.world_size
        self._number = (store.add("arrived", 1) - 1) // size
        # After the arrival: connecting takes seconds if torch cannot resolve the host's name.
        self._store = dist.PrefixStore("accelerate/ranks", _connection(self._origin))
        self._keys = dist.PrefixStore(str(self._number), self._store)
        if call["leads"] and not self.group.one_folder:
            for key in (f"leads/{call['machine']}", f"leads/{call['machine']}/{self.group.rank}"):
                self._store.set(key, str(self.group.rank))
        first = {"first": [call["kind"], call["location"]]}
        if call["scope"]:
            first = {"first": call["kind"], f"first/{call['scope']}": call["location"]}
        differs = False
        for key, value in first.items():
            text = json.dumps(value)
            differs |= self._keys.compare_set(key, "", text).decode() != text
        return differs

    def _machine_leader(self, machine: str, outcome: Note) -> int:
        rank = self.group.rank
        # Most launchers give a machine a block of ranks. That also tells apart machines of one name.
        usual = rank - self.group.local_rank
        if "notes" in outcome:
            calls = {other: note["value"] for other, note in outcome["notes"].items()}
            leaders = [other for other, call in calls.items() if call["leads"] and call["machine"] == machine]
            return usual if usual in leaders else [*leaders, rank][0]
        if self.group.each_node:
            self._keys.delete_key(f"first/{machine}")
        keys = [key for key in (f"leads/{machine}/{usual}", f"leads/{machine}") if self._store.check([key])]
        return int(self._store.get(keys[0])) if keys else rank

    def _meet(
        self, value: Any, flag: bool = False, error: BaseException | None = None, level: int = 1, raises: bool = True
    ) -> Note:
        """Come to the next round with a JSON value; return its outcome once all ranks have come.

        Raise the error of any rank if `raises`, and in any case one for a rank that will never come and for a store that fails.
        """
        try:
            outcome = self._outcome(value, flag, error, level)
        except RuntimeError as store_error:
            raise error or RuntimeError(self._store_problem(store_error)) from store_error
        if outcome["error"] is None:
            return outcome
        self.leave()
        if raises and error is not None and self.group.rank not in outcome["lost"]:
            raise error  # else the others left, and it followed from that
        if raises or outcome["lost"]:
            raise RuntimeError(f"{self._kind}({self._location!r}) {outcome['error']}") from error
        return outcome

    def _outcome(self, value: Any, flag: bool, error: BaseException | None = None, level: int = 0) -> Note:
        """Come to the next round, and return its outcome; without a store it has the notes of all ranks."""
        self._round += 1
        # Who comes to a round may overwrite the note of the round before the last: all have read that. Calls have a key to
        # themselves, because a rank may come to the next meeting before others have read the last note of this one.
        self._note_key = "call/{}" if self._round == 0 else f"note/{{}}/{self._round % 2}"
        note: Note = {
            "round": [self._number, self._round],
            "value": value,
            "error": None if error is None else _short(f"{type(error).__name__}: {error}"),
            "level": 0 if error is None else level,
        }
        if self._store is None:
            return self._gathered_outcome(note, flag)
        failed, key = error is not None, f"outcome/{self._round}"
        self._store.set(self._note_key.format(self.group.rank), json.dumps(note))
        come = self._keys.add("come", 1 + _FLAG * flag + _FAILED * failed)
        ticket, flags, failures = come % _FLAG, come % _FAILED // _FLAG, come // _FAILED
        # The last rank to come writes the outcome, or one that looks for missing ranks.
        if ticket == self.group.world_size:
            self._keys.set("come", "0")
            with contextlib.suppress(RuntimeError):  # a store that cannot delete
                self._keys.delete_key(f"outcome/{self._round - 1}")  # all have read it, because they have come here
            # The notes of others are read only where something is wrong.
            wrong = failures or (flags and self._round == 0)
            summary = self._summary(self._notes() if wrong else {self.group.rank: note}, flags)
            self._keys.compare_set(key, "", json.dumps(summary))  # unless a rank that looks for others has written one
        elif ticket <= 2 or (failed and failures == 1):
            self._search(key, failed, deputy=ticket == 2 and not failed)
        elif _connection(self._origin) is self._origin:
            while not self._keys.check([key]):
                time.sleep(_LONGEST_PAUSE_S)
        outcome: Note = json.loads(self._keys.get(key))
        return outcome

    def _gathered_outcome(self, note: Note, flag: bool) -> Note:
        """Return the outcome of a round without a store, by a collective."""
        # The communicator of a single process is not asked: the run may have reset its state meanwhile.
        come = [(note, flag)] if self.group.world_size == 1 else comm.current().gather_object((note, flag))
        notes = {rank: rank_note for rank, (rank_note, _) in enumerate(come)}
        return {**self._summary(notes, sum(rank_flag for _, rank_flag in come)), "notes": notes}

    def _summary(self, notes: dict[int, Note], flags: int) -> Note:
        """Return the outcome of a round to which all ranks have come, by their notes, or by one of these if nothing is wrong."""
        if self._round == 0:
            calls = {rank: note["value"] for rank, note in notes.items()}
            return {
                "misuse": _disagreement(calls) if len(calls) > 1 else None,
                "name": next(iter(calls.values()))["name"],
            }
        outcome: Note = {"flags": flags, "error": None, "level": 0, "lines": [], "lost": []}
        for rank, note in sorted(notes.items()):
            if note["level"] > outcome["level"]:
                outcome.update(level=note["level"], lines=[])
            if note["level"] == outcome["level"] > 0:
                outcome["lines"].append(f"Rank {rank}: {note['error']}")
        if outcome["lines"]:
            outcome["lines"] = first_of(outcome["lines"], _MOST)
            outcome["error"] = f"failed on other ranks. {' '.join(outcome['lines'])}"
        return outcome

    # -- missing ranks -------------------------------------------------------------------------------------------------

    def _search(self, key: str, failed: bool, deputy: bool) -> None:
        """Wait for the outcome of a round, and write it if a rank will never come."""
        patient = self._round > 0 and not failed
        after_s, again_s = (ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S) if patient else (ASK_AFTER_S, ASK_AGAIN_S)
        slower = _DEPUTY if deputy else 1
        began, search, reported = time.monotonic(), None, deputy
        while not self._keys.check([key]):
            waited_s = time.monotonic() - began
            time.sleep(min(waited_s / 10, _LONGEST_PAUSE_S))
            if waited_s < after_s * slower:
                continue
            everyone, limit_s = range(self.group.world_size), float("inf") if patient else _limit_s()
            search = search or peers.search(self._origin, everyone, again_s * slower, limit_s)
            if not search.news():
                continue
            notes = self._notes()
            states = {rank: str(status) for rank, status in search.latest.items() if rank not in notes}
            if (outcome := self._lost(search, notes, states, failed)) is not None:
                self._keys.compare_set(key, "", json.dumps(outcome))
            elif self._round == 0 and states and not reported and time.monotonic() - search.began > REPORT_AFTER_S:
                reported = True
                lines = "; ".join(_lines(states))
                logger.warning("%s(%r) waits for other ranks: %s.", self._kind, self._location, lines)

    def _lost(
        self, search: MissingRanks, notes: dict[int, Note], missing: dict[int, str], failed: bool
    ) -> Note | None:
        """Return the outcome of a round that cannot end otherwise: a rank is gone, or waits for one that has come."""
        may_be_stuck = bool(missing) and (failed or self._round == 0)
        # Where none is missing, the rank that should have written the outcome is gone.
        lost = search.gone(missing or search.latest) or (search.stuck(list(missing)) if may_be_stuck else [])
        if self._round > 0:
            lines = _lines({rank: str(search.latest[rank]) for rank in lost})
            text = f"did not come to its end. The others cannot continue: {'; '.join(lines)}."
            return {"error": text, "lost": lost} if lost else None
        calls = {rank: note["value"] for rank, note in notes.items()}
        misuse = _disagreement(calls) or (_never_called(calls, missing, lost) if lost else None)
        if misuse is None:
            return None
        # Ranks that come later belong to the next meeting.
        following = (self._number + 1) * self.group.world_size
        arrived = self._store.add("arrived", 0)
        while arrived < following:
            arrived = int(self._store.compare_set("arrived", str(arrived), str(following)))
        return {"misuse": misuse}

    def _notes(self) -> dict[int, Note]:
        """Return the notes of the ranks that have come to this round."""
        return {rank: note for rank in range(self.group.world_size) if (note := self._note(rank)) is not None}

    def _note(self, rank: int) -> Note | None:
        key = self._note_key.format(rank)
        note: Note | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return note if note is not None and note["round"] == [self._number, self._round] else None

    def _store_problem(self, error: RuntimeError) -> str:
        call = f"{self._kind}({self._location!r}) at {self._site}: the "
        if isinstance(error, getattr(dist, "DistNetworkError", RuntimeError)):
            call += "process that holds the ranks' key-value store has ended, so the other ranks cannot be met"
            return f"{call}. Call {self._kind} on every rank before any of them ends."
        return f"{call}ranks' key-value store failed, so the other ranks cannot be met: {_short(str(error))}"


# By the store, with the process: a fork must not use its parent's.
_connections: "weakref.WeakKeyDictionary[Any, tuple[int, Any]]" = weakref.WeakKeyDictionary()


def _connection(store: Any) -> Any:
    """Return a second connection to a store, which is kept, or the store itself where torch cannot make one."""
    pid, second = _connections.get(store, (0, store))
    if pid != os.getpid() and (second := connection(store)) is not store:
        second.set_timeout(_FOREVER)
        _connections[store] = os.getpid(), second
    return second


# -- messages ------------------------------------------------------------------------------------------------------


def _disagreement(calls: dict[int, Note]) -> str | None:
    """Return what is wrong with the calls of ranks, or None."""
    kinds = sorted({call["kind"] for call in calls.values()})
    locations = {(call["scope"], call["location"]) for call in calls.values()}
    if len(kinds) > 1:
        return _message(f"Some ranks called {kinds[0]} while others called {kinds[1]}:", calls)
    if len(locations) > len({scope for scope, _ in locations}):
        return _message(f"{kinds[0]} was called with different paths:", calls)
    return None


def _never_called(calls: dict[int, Note], states: dict[int, str], hopeless: list[int]) -> str:
    kind = next(iter(calls.values()))["kind"]
    title = f"{kind} was called by rank {_numbers(calls)}, but rank {_numbers(hopeless)} will not call it:"
    return _message(title, calls, {rank: f"did not call it: it {state}" for rank, state in states.items()})


def _message(title: str, calls: dict[int, Note], others: dict[int, str] | None = None) -> str:
    texts = {rank: f"called {call['kind']}({call['location']!r}) at {call['site']}" for rank, call in calls.items()}
    lines = _lines(dict(sorted((texts | (others or {})).items())))
    kind = min(call["kind"] for call in calls.values())
    return "\n  ".join([title, *lines]) + f"\nCall {kind} on every rank, with the same path."


def _lines(texts: dict[int, str]) -> list[str]:
    """Return a line for each text, with the ranks it is true for."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return first_of([f"rank {_numbers(of_text)} {_short(text)}" for text, of_text in ranks.items()], _MOST)


def _short(text: str) -> str:
    """Return a text of at most so many bytes, as it may be printed."""
    text = printable(text)
    data = text.encode()
    return text if len(data) <= _LONGEST else data[:_LONGEST].decode(errors="ignore") + "…"


def _numbers(ranks: Collection[int]) -> str:
    """Write ranks down shortly: "0-2, 5"."""
    # Within a run of neighbours, a rank and its place among all grow by one each.
    runs = itertools.groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ", ".join(first_of([str(first) if first == last else f"{first}-{last}" for first, last in ends], _MOST))
