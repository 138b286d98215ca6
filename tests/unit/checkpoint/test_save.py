"""Who stages for whom, and ranks that meet without a store."""

import threading

import pytest

from accelerate.checkpoint import save
from accelerate.checkpoint.barrier import CollectiveMisuse, SaveBarrier
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.save import Group, Save
from accelerate.checkpoint.storage import storage_of


@pytest.mark.parametrize(
    ("machines", "leaders"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [0, 0, 2, 2]),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [0, 1, 0, 1]),  # dealt out in turn
        ([("a", 0), ("a", 0), ("a", 1), ("a", 0)], [0, 1, 1, 3]),  # machines that are played by one
        ([("a", 0), ("b", 0), ("b", 1), ("b", 2)], [0, 1, 1, 1]),
    ],
)
def test_leaders(machines, leaders):
    for rank, (_, local) in enumerate(machines):
        barrier = SaveBarrier("save_state", "x", rank, 1, None)
        barrier.ranks = list(range(len(machines)))
        barrier._machines = {other: [host, number] for other, (host, number) in enumerate(machines)}
        assert barrier.leader(rank - local) == leaders[rank], rank


class Exchange:
    """The collectives of ranks that are played by threads."""

    def __init__(self, size):
        self.barrier, self.said = threading.Barrier(size), {}

    def of(self, rank):
        exchange = self

        class Communicator:
            def gather_object(self, obj):
                exchange.said[rank] = obj
                exchange.barrier.wait()
                found = [exchange.said[number] for number in sorted(exchange.said)]
                exchange.barrier.wait()
                return found

        return Communicator()


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_without_a_store_meet_by_collectives(tmp_path, monkeypatch, differ):
    exchange, local, ended = Exchange(2), threading.local(), {}
    monkeypatch.setattr("accelerate.checkpoint.barrier.comm.current", lambda: exchange.of(local.rank))
    monkeypatch.setattr(save, "default_store", lambda: None)

    def play(rank):
        local.rank = rank
        place = storage_of(tmp_path / (f"c{rank}" if differ else "c"))
        save = Save(place, Group(rank, 2, rank, 2, False, True), {"world_size": 2})
        assert not save.barrier.in_background
        try:
            save.begin()
            save.plan().add_bytes(f"custom_checkpoint_{rank}.pkl", b"x" * 1000)
            save.finish()
            ended[rank] = save.barrier.name
        except CollectiveMisuse as error:
            ended[rank] = str(error)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    if differ:
        assert all("different paths" in text for text in ended.values()) and len(ended) == 2
        return
    manifest = Manifest.read(tmp_path / "c")
    assert set(manifest.files) == {"custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"}
    assert set(ended.values()) == {manifest.save}
