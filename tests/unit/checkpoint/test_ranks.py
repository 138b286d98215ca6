"""How ranks save together, played by threads that meet through a store within one process."""

import threading

import pytest
import torch.distributed as dist

from accelerate.checkpoint import ranks as checkpoint_ranks
from accelerate.checkpoint.ranks import CollectiveMisuse, Group, Problem, Ranks
from accelerate.runtime import peers
from cases import cases

LIMIT_S = 30


class Threads:
    """Threads that play the three ranks of a run."""

    def __init__(self):
        self.size, self.store = 3, dist.HashStore()
        self.results, self.raised, self.threads = {}, {}, {}

    def seen_by(self, rank, local_rank=None):
        """Return the ranks as one of them has them; with a local rank, machines have separate checkpoints."""
        each_node = local_rank is not None
        return Ranks(Group(rank, self.size, local_rank or 0, each_node, not each_node), self.store)

    def agreed(self, rank, location="/run/folder", kind="save_state", local_rank=None):
        """Return the ranks once all have made this call."""
        ranks = self.seen_by(rank, local_rank)
        ranks.agree(kind, location)
        return ranks

    def start(self, function, *ranks):
        """Let ranks, by default all, run a function of their number; what it returns or raises is kept."""
        for rank in ranks or range(self.size):
            self.threads[rank] = threading.Thread(target=self._run, args=(function, rank), daemon=True)
            self.threads[rank].start()

    def _run(self, function, rank):
        try:
            self.results[rank] = function(rank)
        except BaseException as error:
            self.raised[rank] = error

    def join(self, *ranks):
        for rank in ranks or self.threads:
            self.threads[rank].join(LIMIT_S)
            assert not self.threads[rank].is_alive(), f"rank {rank} hangs"

    def play(self, function, *ranks):
        self.start(function, *ranks)
        self.join()


@pytest.fixture
def ranks(monkeypatch):
    for name in ("ASK_AFTER_S", "ASK_WRITERS_AFTER_S"):
        monkeypatch.setattr(checkpoint_ranks, name, float("inf"))
    monkeypatch.setattr(peers, "_extensions", lambda: ())  # they serve processes, not threads
    made = Threads()
    yield made
    made.join()


def save_here(gathered):
    gathered.agree("save_state", "/run/folder")


def alone(store, rank=0):
    return Ranks(Group(rank, 2, 0, False, True), store)


def test_saves_of_all_ranks_leave_nothing_that_piles_up(ranks):
    keys = []

    def save(rank):
        gathered = ranks.agreed(rank)
        said = [gathered.share({"rank": rank}), gathered.share([rank] * rank, root=1), gathered.share(rank, root=rank)]
        said += [gathered.share(), gathered.any(False), gathered.any(rank == 2), gathered.smallest(7 - rank)]
        gathered.leave()
        return said, gathered.name

    names = set()
    for _ in range(4):
        ranks.play(save)
        assert ranks.raised == {} and len({ranks.results[rank][1] for rank in range(3)}) == 1
        for rank in range(3):
            assert ranks.results[rank][0] == [{"rank": 0}, [1], rank, None, False, True, 5]
        names.add(ranks.results[0][1])
        keys.append(ranks.store.num_keys())
    assert len(names) == 4 and len(set(keys[1:])) == 1, keys


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_fail_together(ranks, failing):
    def save(rank):
        gathered = ranks.agreed(rank)
        for refused, error in ((object(), TypeError), ("y" * (64 << 10), ValueError)):
            with pytest.raises(error, match="JSON|65536 bytes"):  # refused where it is left
                gathered.share(refused, root=rank)
        gathered.share("a note", error=OSError("disk full") if rank == failing else None)

    ranks.play(save)
    assert [type(ranks.raised[rank]) is OSError for rank in range(3)] == [rank == failing for rank in range(3)]
    text = f"save_state('/run/folder') failed on other ranks. Rank {failing}: OSError: disk full"
    assert {str(ranks.raised[rank]) for rank in range(3) if rank != failing} == {text}


def test_of_many_problems_some_are_told(ranks):
    ranks.size = 45

    def save(rank):
        gathered = ranks.agreed(rank)
        gathered.any(True, OSError("\u00e4\n\x00" * 5000) if rank else None)

    ranks.play(save)
    text = str(ranks.raised[0])
    assert text.count("OSError: \u00e4") == 30 and text.endswith(" and 14 more") and len(text.encode()) < 64 << 10
    assert all(type(ranks.raised[rank]) is OSError for rank in range(1, 45))


def test_machines_of_their_own_have_paths_and_leaders_of_their_own(ranks, monkeypatch):
    places = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 5)]  # dealt out in turn; the last one is alone
    ranks.size, machine = 5, threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: machine.name)

    def save(rank):
        machine.name, local = places[rank]
        gathered = ranks.agreed(rank, f"/scratch/{machine.name}", local_rank=local)
        return gathered.leader()

    ranks.play(save)
    assert ranks.raised == {} and ranks.results == {0: 0, 1: 1, 2: 0, 3: 1, 4: 4}


@cases(
    "kinds, places, text",
    ("save", "010", "save_state was called with different paths:\n  rank 0, 2 called save_state('/run/0') at "),
    ("load", "01111111101", "rank 1-8, 10 called load_state('/run/1') at "),
    (["save", "load"], "00", "Some ranks called load_state while others called save_state:\n  rank 0 called save_"),
    ("save", range(20), "\nCall save_state on every rank, with the same path."),
)
def test_different_calls_are_an_error_on_all_ranks(ranks, kinds, places, text):
    ranks.size = len(places)
    kinds = kinds if isinstance(kinds, list) else [kinds] * ranks.size
    ranks.play(lambda rank: ranks.agreed(rank, f"/run/{places[rank]}", f"{kinds[rank]}_state"))
    assert [type(ranks.raised.get(rank)) for rank in range(ranks.size)] == [CollectiveMisuse] * ranks.size
    assert len({str(error) for error in ranks.raised.values()}) == 1 and text in str(ranks.raised[0])


def test_a_lost_store_is_an_error_that_names_the_call(ranks):
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", held.port, is_master=False) for _ in range(2)]
    gathered = [alone(stores[rank], rank) for rank in range(2)]
    ranks.play(lambda rank: save_here(gathered[rank]), 0, 1)
    del held
    with pytest.raises(RuntimeError, match="key-value store has ended"):
        gathered[0].share()
    with pytest.raises(CollectiveMisuse, match="key-value store has ended") as raised:
        save_here(alone(stores[0]))
    assert f"{__file__}:" in str(raised.value) and "in save_here" in str(raised.value)


def test_ranks_give_up_one_that_does_not_come_within_the_limit(ranks, monkeypatch):
    monkeypatch.setattr(checkpoint_ranks, "ASK_AFTER_S", 0.05)
    monkeypatch.setattr(checkpoint_ranks, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(checkpoint_ranks, "_limit_s", lambda: 0.3)
    ranks.play(lambda rank: ranks.agreed(rank), 0, 1)
    for rank in (0, 1):
        assert isinstance(ranks.raised[rank], CollectiveMisuse)
        assert "rank 2 did not call it: it has not come (the limit is 0 s)" in str(ranks.raised[rank])


def test_a_rank_that_leaves_twice_counts_once(ranks):
    def save(rank):
        gathered = ranks.agreed(rank)
        gathered.any(False)
        return gathered

    ranks.play(save)
    for _ in range(3):
        ranks.results[0].leave()
    assert ranks.store.check(["accelerate/ranks/0/outcome/1"])  # the other ranks may not have read it
    ranks.results[1].leave(), ranks.results[2].leave()
    assert not ranks.store.check(["accelerate/ranks/0/outcome/1"])


def test_the_worst_problem_counts_on_all_ranks(ranks):
    levels = [1, 3, 3, 0]
    ranks.size = len(levels)
    problems = [Problem(level, OSError(f"{level}")) if level else None for level in levels]
    ranks.play(lambda rank: ranks.agreed(rank).worst(problems[rank]))
    assert ranks.raised == {} and [ranks.results[rank] is problems[rank] for rank in (1, 2)] == [True, True]
    for rank in (0, 3):
        worst = ranks.results[rank]
        assert (worst.level, worst.lines) == (3, ["Rank 1: OSError: 3", "Rank 2: OSError: 3"])
        assert str(worst.error) == f"save_state('/run/folder') failed on other ranks. {' '.join(worst.lines)}"
