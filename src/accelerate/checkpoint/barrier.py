"""The barrier of ``save_state`` and ``load_state``: rounds over the process group's key-value store, O(1) for each rank.

A collective hangs, or mixes up data, if one rank calls something else, or with another path. In a round each rank adds
itself to a counter, and the last one to come writes the outcome that all others wait for. A rank that is missing, or that
named another folder, is found within seconds, and every rank that called raises an error with all call sites. The
barrier waits for a slow rank, and ends where `runtime.peers.search` finds that a rank will never come. Ranks wait on a
connection of their own: that of the process must stay free for the training.

A rank sends and receives a few small values in each round, however many ranks there are. Only what is wrong is read by
another rank, by one, which tells all.

The keys, under "accelerate/barrier/": "round" is the number of the barrier that is open, and "N/R/" has those of its round R:
"come", which counts the ranks, "outcome", "asks", and "problem/1", "problem/2", ... "N/left" counts the ranks that have left the
barrier; the last one removes its keys, and those of the barrier before by which a rank that comes too late sees that it is over. What
stays is overwritten by the next barrier: of each rank its "call", the round that it is "at", and the "value" that it shared; of each
machine the rank that "leads" it, and the "first" place.

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
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelerate import comm
from accelerate.base._warn import printable
from accelerate.checkpoint.manifest import first_of
from accelerate.runtime import peers, torch_private
from accelerate.runtime.call_site import call_site
from accelerate.runtime.peers import MissingRanks
from accelerate.runtime.rendezvous import connection
from accelerate.runtime.run import Run

if TYPE_CHECKING:
    from accelerate.checkpoint.storage import CheckpointStorage

logger = logging.getLogger(__name__)

_PREFIX = "accelerate/barrier"

# When a rank begins to ask where the missing ones are, and how long after an answer it asks again.
ASK_AFTER_S, ASK_AGAIN_S = 2.0, 1.0
# The same while ranks write: that takes as long as it takes, and only a rank that is gone ends it.
ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S = 10.0, 5.0
# The deputy of the rank that asks begins so many times later.
_DEPUTY = 3
# How long after its first question a rank reports which ranks it waits for.
REPORT_AFTER_S = 10.0
# The rank that asks, and all where torch cannot clone the connection, look at the store the more seldom the longer they wait, so that
# they lose a tenth of their time at most. The others wait in the store: torch prints a warning whenever such a wait ends early.
_LONGEST_PAUSE_S, _FOREVER = 0.05, timedelta(days=20)

# No value in the store is larger: its server answers all ranks, and closes a connection above 8 MiB.
LARGEST_VALUE = 64 << 10
# So many problems, or ranks and groups of ranks, are reported, and so many bytes of each.
_MOST, _LONGEST = 30, 1000

# What a rank adds to the counter of a round, which is of 64 bits: itself, and whether it has a flag or a problem.
_FLAG, _FAILED = 1 << 20, 1 << 40

# The outcome of a `begin` for ranks that came when all others had left.
_OVER = {"come": 0, "problem": None}

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
    """One ``save_state`` or ``load_state`` of all ranks: ``begin``, any number of ``share`` and ``any_of``, ``leave``.

    Every rank makes one and calls these in the same order. ``begin`` belongs into the thread of the call; the rest may
    run in another one, if ``in_background``, while no other barrier of this process begins. Several ranks without a
    store meet by collectives, which wait without limit.

    Attributes:
        name: A name that no other barrier has, the same on all ranks once it has begun.
    """

    def __init__(self, kind: str, location: str, group: Group, store: Any | None) -> None:
        self.kind, self.location, self.rank, self.world_size = kind, location, group.rank, group.world_size
        self.name = os.urandom(8).hex()
        self.in_background = store is not None or self.world_size == 1
        self._group, self._leader = group, 0
        self._site, self._reported, self._failed, self._given_up = "", False, False, False
        self._origin: Any = store if self.world_size > 1 else None
        # From `begin` on: the keys of all barriers, those of this one and those of its round, by a connection of their own.
        self._store: Any = None
        self._keys: dist.Store
        self._round: dist.Store
        self._number, self._round_number, self._ticket, self._problems = -1, -1, 0, 0
        self._connection: Any = None
        self._leaving = self.world_size  # all ranks, or those that called where others never will

    # What ranks do together

    def begin(self) -> None:
        """Wait until every rank has made the same call; CollectiveMisuse on all that called if some rank will not."""
        peers.joined(self._origin, self.rank, self.world_size)
        self._site = call_site()
        machine, local_rank = socket.gethostname(), self._group.local_rank
        call: Note = {"kind": self.kind, "location": self.location, "site": self._site, "name": self.name}
        call |= {"scope": machine if self._group.each_node else "", "leads": machine if local_rank == 0 else None}
        usual = self.rank - local_rank  # most launchers give each machine a block of ranks
        if self._origin is None:
            calls = self._gather(call)
            problem, self.name = _disagreement(dict(enumerate(calls))), calls[0]["name"]
            leaders = [rank for rank, one in enumerate(calls) if one["leads"] == machine]
        else:
            problem = self._join(call)
            stored = [_read(self._store, f"leads/{machine}/{usual}"), _read(self._store, f"leads/{machine}")]
            leaders = [rank for rank in stored if rank is not None]
        if problem is not None:
            self.leave()
            raise CollectiveMisuse(problem)
        # Others are known by the name of the machine, which another one may have, too.
        self._leader = usual if usual in leaders else (leaders or [self.rank])[0]

    def leader(self) -> int:
        """Return the rank that stages for this one: rank 0, or where each machine stages the number 0 of this one's machine."""
        return 0 if self._group.shared else self._leader

    def share(self, value: Any = None, root: int = 0, problem: BaseException | None = None) -> Any:
        """Return the small JSON value that rank `root` shares, of which ranks may name different ones; all ranks.

        Where a rank has a `problem`, it raises that as it is, and the others a RuntimeError that says where and what is wrong;
        so they do where a rank is gone.
        """
        text = json.dumps(value if self.rank == root else None)  # where it fails, this rank has not come to the round
        if len(text) > LARGEST_VALUE:
            raise ValueError(
                f"Ranks share {LARGEST_VALUE} bytes at most, but got {len(text)}. Share the path of a file."
            )
        # A rank that sets its next value but one knows that all others have read this one.
        key, shares = f"value/{{}}/{(self._round_number + 1) % 2}", text != "null"
        if shares and self._store is not None:
            self._store.set(key.format(self.rank), json.dumps([self.name, self._round_number + 1, text]))
        outcome = self._synchronize(shares, problem, text)
        if "texts" in outcome or self.rank == root:
            return json.loads(outcome.get("texts", {root: text})[root])
        known = _read(self._store, key.format(root)) if outcome["flags"] else None
        if known is None or known[:2] != [self.name, self._round_number]:
            return None
        return json.loads(known[2])

    def any_of(self, flag: bool, problem: BaseException | None = None) -> bool:
        """Say whether the flag of any rank is true, or raise what `share` raises. All ranks."""
        return self.count_of(flag, problem) > 0

    def count_of(self, flag: bool, problem: BaseException | None = None) -> int:
        """Return on how many ranks the flag is true, or raise what `share` raises. All ranks."""
        count: int = self._synchronize(bool(flag), problem)["flags"]
        return count

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks."""
        if self._store is None:
            numbers: list[int] = self._gather(number)
            return min(numbers)
        key, known = f"{self._round_number + 1}/smallest", ""
        while (known := self._keys.compare_set(key, known, str(number)).decode()) and int(known) > number:
            continue  # seldom more than once: ranks have the same number, as a rule
        self._synchronize(False, None)
        return int(self._keys.get(key))

    def leave(self) -> None:
        """End the barrier, after the last round; the last rank to leave removes its keys, which would pile up in a long run."""
        if self._store is None:
            return
        keys = [f"{self._number - 1}/0/come", f"{self._number - 1}/0/outcome"]
        keys += [f"{self._number}/left", f"{self._number}/0/asks"]
        rounds = [f"{self._number}/{number}" for number in range(1, self._round_number + 1)]
        keys += [f"{place}/{name}" for place in rounds for name in ("come", "outcome", "smallest", "problems", "asks")]
        keys += [f"{place}/problem/{number}" for place in rounds[-1:] for number in range(1, self._problems + 1)]
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or whose process has ended
            if self._keys.add("left", 1) == self._leaving:
                for key in keys:
                    self._store.delete_key(key)

    # Rounds

    def _synchronize(self, flag: bool, problem: BaseException | None, text: str = "null") -> Note:
        """Wait for all ranks, or raise where one failed or is gone; return the outcome, with the texts of all only without a store."""
        self._failed = self._failed or problem is not None
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        try:
            outcome = self._join_round(flag, said, text)
        except RuntimeError as error:
            if problem is None or self._given_up:  # what failed here then is that the others have left
                raise error from problem
            raise problem from None
        if outcome["failed"]:
            self.leave()
        if problem is not None:
            raise problem
        if outcome["failed"]:
            raise RuntimeError(f"{self.kind}({self.location!r}) failed on other ranks. {' '.join(outcome['failed'])}")
        return outcome

    def _join_round(self, flag: bool, problem: str | None, text: str) -> Note:
        if self._store is None:
            flags, problems, texts = zip(*self._gather([flag, problem, text]), strict=True)
            failed = {rank: said for rank, said in enumerate(problems) if said is not None}
            return {"flags": sum(flags), "failed": _problems(failed), "texts": texts}
        try:
            outcome = self._come(flag, problem)
        except RuntimeError as error:
            raise RuntimeError(self._store_problem(error)) from error
        if "lost" in outcome:
            self._given_up = self._ticket > outcome["come"]
            raise RuntimeError(f"{self.kind}({self.location!r}) did not come to its end. {outcome['lost']}")
        self._problems = len(outcome["failed"])
        return outcome

    def _gather(self, note: Any) -> list[Any]:
        """Return the notes of all ranks, which have no store."""
        # The communicator of a single process is not asked: the run may have reset its state meanwhile.
        return [note] if self.world_size == 1 else comm.current().gather_object(note)

    def _join(self, call: Note) -> str | None:
        """Join the barrier that is open, until there is an outcome of one that this rank is part of; return what is wrong."""
        shared = dist.PrefixStore(_PREFIX, self._origin)
        try:
            while True:
                self._number, self._round_number = int(shared.compare_set("round", "", "0")), -1
                self._use(_connected(self._origin, new=False))
                outcome = self._come(self._call(call))
                # Before this rank goes on, because it may begin the next barrier at once.
                self._store.compare_set("round", str(self._number), str(self._number + 1))
                if self._ticket <= outcome["come"]:
                    self._leaving = outcome["come"]
                    problem: str | None = outcome["problem"]
                    return problem
                # The others decided while this rank came in. If they have also left, the keys are its own.
                if not outcome["come"]:
                    with contextlib.suppress(RuntimeError):  # a store that cannot delete
                        self._keys.delete_key("0/come"), self._keys.delete_key("0/outcome")
        except RuntimeError as error:
            raise CollectiveMisuse(self._store_problem(error)) from error

    def _use(self, connection: Any) -> None:
        """Take a connection to the store."""
        self._connection, self._store = connection, dist.PrefixStore(_PREFIX, connection)
        self._keys = dist.PrefixStore(str(self._number), self._store)
        self._round = dist.PrefixStore(str(self._round_number), self._keys)

    def _call(self, call: Note) -> bool:
        """Leave this rank's call; say whether it differs from the first one."""
        self._store.set(f"call/{self.rank}", json.dumps({**call, "number": self._number}))
        if (machine := call["leads"]) is not None:
            self._store.set(f"leads/{machine}/{self.rank}", str(self.rank))
            self._store.compare_set(f"leads/{machine}", "", str(self.rank))
        self.name, kind = self._first("first", [call["name"], self.kind])
        return [kind, self._first(f"first/{call['scope']}", self.location)] != [self.kind, self.location]

    def _first(self, key: str, value: Any) -> Any:
        """Return what the first rank of this barrier has left under a key, which the first one of the next barrier overwrites."""
        mine, known = json.dumps([self._number, value]), ""
        while json.loads(known := self._store.compare_set(key, known, mine).decode())[0] < self._number:
            continue
        return json.loads(known)[1]

    def _come(self, flag: bool, problem: str | None = None) -> Note:
        """Come to the next round, and return its outcome: the last rank to come decides it by the counter.

        Before that the first rank to come, or to fail, may do so: it asks where the others are. The second to come is its deputy, should it
        be killed: it asks when the first one has not for a while.
        """
        self._round_number += 1
        self._round, begins = dist.PrefixStore(str(self._round_number), self._keys), self._round_number == 0
        failed = 0
        if problem is not None:
            failed = self._round.add("problems", 1)
            if failed <= _MOST:
                self._round.set(f"problem/{failed}", json.dumps([self.rank, _short(problem)]))
        self._store.set(f"at/{self.rank}", json.dumps([self._number, self._round_number]))
        come = self._round.add("come", 1 + _FLAG * flag + _FAILED * (failed > 0))
        self._ticket = come % _FLAG
        if self._ticket == self.world_size:
            return self._decide(self._agree(come) if begins else self._sum_up(come))
        if self._connection is self._origin:
            # Not before the others count this rank: to connect takes seconds where torch looks up the host's name in vain.
            self._use(_connected(self._origin))
        asks = self._ticket <= 2 or failed == 1
        if asks or self._connection is self._origin:
            return self._poll(begins, asks, self._ticket == 2 and failed != 1)
        self._round.wait(["outcome"], _FOREVER)
        return _read(self._round, "outcome") or _OVER

    def _poll(self, begins: bool, asks: bool, is_deputy: bool) -> Note:
        """Look for the outcome of a round until it is there. A rank that `asks` decides it, if one of the others will never come."""
        writes = not begins and not self._failed
        after_s, again_s = (ASK_WRITERS_AFTER_S, ASK_WRITERS_AGAIN_S) if writes else (ASK_AFTER_S, ASK_AGAIN_S)
        judge = self._judge_callers if begins else self._judge_missing
        began, waited_s, search, there, signs_at = time.monotonic(), 0.0, None, (self._ticket, 0), 0.0
        while True:
            time.sleep(min(waited_s / 10, _LONGEST_PAUSE_S))
            # Looked for first: a read of what is not there yet would wake those that wait for it.
            outcome: Note | None = _read(self._round, "outcome") if self._round.check(["outcome"]) else None
            if outcome is not None:
                return outcome
            waited_s = time.monotonic() - began
            if waited_s < (_DEPUTY * after_s if is_deputy else after_s):
                continue
            # Of many ranks on few cores some are still on their way; and a deputy asks nothing as long as the first rank does.
            if asks and search is None and (seen := self._seen(is_deputy)) != there:
                began, there = time.monotonic(), seen
                continue
            if asks and not is_deputy and time.monotonic() >= signs_at:
                signs_at = time.monotonic() + after_s
                self._round.add("asks", 1)
            everyone = list(range(self.world_size))
            search = search or peers.search(
                self._origin, everyone, asks, again_s, float("inf") if writes else _limit_s()
            )
            if (outcome := judge(search)) is not None:
                return self._decide(outcome)

    def _seen(self, is_deputy: bool) -> tuple[int, int]:
        """Return how many ranks have come to the round and, for a deputy, what the rank that asks counts up to show that it does."""
        return self._round.add("come", 0) % _FLAG, self._round.add("asks", 0) if is_deputy else 0

    def _decide(self, outcome: Note) -> Note:
        """Write the outcome of the round, unless another rank has; return what holds."""
        decided: Note = json.loads(self._round.compare_set("outcome", "", json.dumps(outcome)))
        return decided

    def _store_problem(self, error: RuntimeError) -> str:
        call = f"{self.kind}({self.location!r}) at {self._site}: the "
        if isinstance(error, getattr(dist, "DistNetworkError", RuntimeError)):
            call += "process that holds the ranks' key-value store has ended, so the other ranks cannot be met"
            return f"{call}. Call {self.kind} on every rank before any of them ends."
        return f"{call}ranks' key-value store failed, so the other ranks cannot be met: {_short(str(error))}"

    # Outcomes

    def _agree(self, come: int) -> Note:
        """Return the outcome of a `begin` of all ranks."""
        return {"come": self.world_size, "problem": _disagreement(self._calls()) if come >= _FLAG else None}

    def _sum_up(self, come: int) -> Note:
        """Return the outcome of a round of all ranks."""
        flags, failed = come % _FAILED // _FLAG, come // _FAILED
        if not failed:
            return {"flags": flags, "failed": []}
        notes = [json.loads(self._round.get(f"problem/{number + 1}")) for number in range(min(failed, _MOST))]
        return {"flags": flags, "failed": _problems(dict(notes), failed)}

    def _calls(self) -> dict[int, Note]:
        """Return the calls of the ranks that have begun this barrier."""
        calls = {rank: _read(self._store, f"call/{rank}") for rank in range(self.world_size)}
        return {rank: call for rank, call in calls.items() if call is not None and call["number"] == self._number}

    # Who is missing

    def _judge_callers(self, search: MissingRanks) -> Note | None:
        """Decide a barrier that not all ranks have begun, if those that are missing will not."""
        # The outcome is written before the number changes: where it is not there then, the keys have been removed.
        if int(self._store.get("round")) != self._number and not self._round.check(["outcome"]):
            return _OVER
        if not search.news():
            return None
        come = (
            self._round.add("come", 0) % _FLAG
        )  # before the calls: a rank that comes later is not part of the outcome
        calls = self._calls()
        states = {rank: str(status) for rank, status in search.latest.items() if rank not in calls}
        problem = _disagreement(calls)
        if problem is None and (hopeless := search.gone(states) or search.stuck(list(states))):
            problem = _never_called(calls, states, hopeless)
        if problem is not None:
            return {"come": come, "problem": problem}
        if states and self._ticket == 1 and not self._reported and time.monotonic() - search.began > REPORT_AFTER_S:
            self._reported = True
            logger.warning("%s(%r) waits for other ranks: %s.", self.kind, self.location, "; ".join(_lines(states)))
        return None

    def _judge_missing(self, search: MissingRanks) -> Note | None:
        """End a round if a rank is gone, or one that has not come waits in a collective for this rank, which has failed."""
        if not search.news():
            return None
        here = [self._number, self._round_number]
        missing = [rank for rank in search.latest if _read(self._store, f"at/{rank}") != here]
        # With all of them there, the rank that should have decided is gone.
        lost = search.gone(missing or search.latest) or (search.stuck(missing) if self._failed and missing else [])
        if not lost:
            return None
        lines = _lines({rank: str(search.latest[rank]) for rank in lost})
        come = self._round.add("come", 0) % _FLAG
        return {"lost": f"The others wait in vain: {'; '.join(lines)}.", "come": come}


# By the store, with the process: a fork must not use its parent's.
_connections: "weakref.WeakKeyDictionary[Any, tuple[int, Any]]" = weakref.WeakKeyDictionary()


def _connected(store: Any, new: bool = True) -> Any:
    """Return a store by a connection that only barriers use, which is kept; the store itself where there is none, and no `new` one shall be made."""
    pid, own = _connections.get(store, (0, None))
    if pid != os.getpid():
        own = connection(store) if new else store
        if own is not store:
            _connections[store] = os.getpid(), own
    return own


def _read(store: Any, key: str) -> Any | None:
    """Return what a key holds, or None. `get` would wait for a key that another rank has just removed."""
    return json.loads(store.compare_set(key, "null", "null"))


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


def _problems(texts: dict[int, str], count: int = 0) -> list[str]:
    """Return a line for each rank that failed, of which there are `count`."""
    return first_of([f"Rank {rank}: {_short(text)}" for rank, text in sorted(texts.items())], _MOST, count)


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
