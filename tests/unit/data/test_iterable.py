"""Streams: sharding them, what they say of themselves, and parts that end together."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate import comm
from accelerate.comm.base import Communicator
from accelerate.data import iterable
from accelerate.data.iterable import (
    IterableDatasetShard,
    PlainStream,
    can_shard_itself,
    is_datapipe,
    is_split_by_node,
)
from loader_samples import Stream


def test_length_is_that_of_the_stream_or_an_error():
    with pytest.raises(TypeError):
        len(IterableDatasetShard(Stream(3)))


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"size\s+of 3"):
        IterableDatasetShard(Stream(3), batch_size=3, num_processes=2, split_batches=True)


def test_epochs_reach_the_stream():
    stream = Stream(3)
    stream.generator = torch.Generator()
    shard = IterableDatasetShard(stream)
    shard.set_epoch(7)
    list(shard)
    assert stream.generator.initial_seed() == 7

    stream.set_epoch = lambda epoch: setattr(stream, "epoch", epoch)
    shard.set_epoch(8)
    list(shard)
    assert stream.epoch == 8 and stream.generator.initial_seed() == 7, "it seeds itself"


def split(world, rank=0, **more):
    return SimpleNamespace(_distributed=SimpleNamespace(rank=rank, world_size=world), **more)


def test_streams_that_are_divided_already_are_recognised():
    assert is_split_by_node(split(2), 2)
    assert not is_split_by_node(Stream(1), 2)
    assert not is_split_by_node(split(1), 1), "with one shard there is nothing to divide"


def test_a_stream_divided_among_others_is_refused():
    assert not is_split_by_node(split(1), 4) and not is_split_by_node(split(4), 1)
    with pytest.raises(
        ValueError, match=r"divided among 4 nodes.*2 data shards.*world_size=2.*shard_iterable_dataset"
    ):
        is_split_by_node(split(4), 2)


def test_pipelines_that_keep_the_shards_of_their_process_are_recognised():
    def split_by_node(source):
        yield from source

    inner = SimpleNamespace(pipeline=[print, split_by_node])
    assert is_split_by_node(inner, 2) and is_split_by_node(SimpleNamespace(pipeline=(inner, print)), 2)
    assert not is_split_by_node(SimpleNamespace(pipeline=[print]), 2)
    assert not is_split_by_node(SimpleNamespace(pipeline="split_by_node"), 2)


def test_datapipes_are_divided_by_torch_if_they_filter(monkeypatch):
    numbers = IterableWrapper(range(4))
    filtered = numbers.sharding_filter().map(str)
    assert is_datapipe(filtered) and not is_datapipe(Stream(1))
    assert not is_split_by_node(filtered, 2), "torch sees one process only, so it divides nothing"
    monkeypatch.setattr(iterable.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(iterable.dist, "get_world_size", lambda: 2)
    assert is_split_by_node(filtered, 2) and not is_split_by_node(numbers, 2) and not is_split_by_node(filtered, 3)
    assert list(PlainStream(numbers)) == [0, 1, 2, 3] and len(PlainStream(numbers)) == 4


def test_streams_in_enough_pieces_divide_themselves():
    dataset = SimpleNamespace(num_shards=3, shard=lambda **_: None)
    assert can_shard_itself(dataset, 3) and not can_shard_itself(dataset, 4)
    assert can_shard_itself(SimpleNamespace(n_shards=3, shard=lambda **_: None), 3), "the older name"
    assert not can_shard_itself(Stream(1), 1)


class StreamWithState(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_stream_with_a_state_is_restored_where_it_is_read_here():
    assert iterable.restores(DataLoader(StreamWithState(6)))
    assert not iterable.restores(DataLoader(StreamWithState(6), num_workers=1))
    assert not iterable.restores(DataLoader(Stream(6)))


class BufferShuffledExamples:
    """Named as the stage of the library `datasets` is."""


@pytest.mark.parametrize(
    "chain",
    [
        BufferShuffledExamples(),
        SimpleNamespace(ex_iterable=BufferShuffledExamples()),
        SimpleNamespace(ex_iterables=[SimpleNamespace(), SimpleNamespace(ex_iterable=BufferShuffledExamples())]),
    ],
)
def test_a_state_without_its_shuffling_buffer_is_not_used(chain):
    stream = StreamWithState(6)
    assert not iterable.has_buffer(stream)
    stream._ex_iterable = chain
    assert iterable.has_buffer(stream) and not iterable.restores(DataLoader(stream))


def test_the_buffer_of_a_datasets_stream_is_seen():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"id": list(range(8))}).to_iterable_dataset(num_shards=2)
    assert not iterable.has_buffer(stream)
    shuffled = stream.shuffle(seed=1, buffer_size=3)
    assert iterable.has_buffer(shuffled) and iterable.has_buffer(shuffled.map(lambda row: row))


# -- ending together, with the other processes played by the test; tests/distributed/test_loaders.py has real ones ------

READY, ENDED, FAILED = 0, 1, 2


class Partner(Communicator):
    """Two processes, of which the other one does what a script says, step by step.

    Args:
        script: its statuses; a tuple is its whole vote.
        text: what it tells of its error.
    """

    rank, world_size = 0, 2

    def __init__(self, *script, text=None):
        self.script, self.text, self.step, self.votes = list(script), text, 0, []

    def all_reduce(self, tensor, op="sum"):
        own = tensor[0].tolist()
        self.votes.append(own)
        said = self.script[self.step]
        tensor[1] = torch.tensor(said if isinstance(said, tuple) else (own[0], self.step, said))
        self.step += 1
        return tensor

    def gather_object(self, obj):
        return [obj, self.text]

    def all_gather_into_list(self, tensor):
        raise AssertionError("not needed")

    broadcast = broadcast_object_list = barrier = all_gather_into_list


@pytest.fixture
def partner(monkeypatch):
    def build(*script, **options):
        made = Partner(*script, **options)
        monkeypatch.setattr(comm, "current", lambda: made)
        return made

    return build


def test_alone_nothing_is_agreed_on():
    assert list(iterable.in_step(iter("abc"))) == ["a", "b", "c"]


def test_equal_ends_leave_nothing_over(partner, caplog):
    other = partner(READY, READY, ENDED)
    assert list(iterable.in_step(iter("ab"))) == ["a", "b"]
    assert [vote[1:] for vote in other.votes] == [[0, READY], [1, READY], [2, ENDED]]
    assert not caplog.records


@pytest.mark.parametrize(
    ("mine", "script", "want", "line"),
    [
        ("abc", (READY, ENDED), "a", "The data of rank 1 ended after 1 batches.*rank 0 had"),
        ("a", (READY, READY), "a", "The data of rank 0 ended after 1 batches.*rank 1 had"),
        ("", (READY,), "", "The data of rank 0 ended after 0 batches"),
        ("abc", (ENDED,), "", "The data of rank 1 ended after 0 batches"),
    ],
)
def test_all_stop_at_the_shortest(partner, caplog, mine, script, want, line):
    partner(*script)
    with caplog.at_level(logging.WARNING):
        assert "".join(iterable.in_step(iter(mine))) == want
    [record] = caplog.records
    assert re.search(line, record.getMessage())


def test_every_loop_is_told_from_the_one_before(partner):
    first, second = partner(ENDED), None
    list(iterable.in_step(iter("")))
    second = partner(ENDED)
    list(iterable.in_step(iter("")))
    assert second.votes[0][0] == first.votes[0][0] + 1


def broken(*items):
    yield from items
    raise OSError("row 5")


def test_the_error_itself_is_raised_where_it_happened(partner):
    partner(READY, READY)
    steps = iterable.in_step(broken("a"))
    with pytest.raises(OSError, match="row 5"):
        assert next(steps) == "a"
        next(steps)


def test_the_others_are_told_whose_error_it_was(partner):
    partner(READY, FAILED, text="OSError: row 5")
    steps = iterable.in_step(iter("abc"))
    assert next(steps) == "a"
    with pytest.raises(RuntimeError, match=r"batch 1 .*rank 1 failed \(OSError: row 5\)"):
        next(steps)


def test_an_error_comes_before_an_end(partner):
    partner(FAILED, text="OSError: row 0")
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        list(iterable.in_step(iter("")))


def test_processes_at_different_places_are_told(partner):
    partner((10**6, 4, READY))
    with pytest.raises(RuntimeError, match=r"rank 0 reads batch 0 .*rank 1 batch 4 of its loop number 1000000"):
        list(iterable.in_step(iter("abc")))


def test_paused_loops_end_where_their_own_data_ends(partner):
    other = partner()
    with iterable.uneven_ends(), iterable.uneven_ends():
        assert list(iterable.in_step(iter("ab"))) == ["a", "b"]
    with pytest.raises(ZeroDivisionError), iterable.uneven_ends():
        raise ZeroDivisionError
    assert not other.votes
    partner(ENDED)
    assert list(iterable.in_step(iter("ab"))) == []


def test_one_batch_is_read_ahead(partner):
    read = []

    def reading():
        for number in range(3):
            read.append(number)
            yield number

    partner(*[READY] * 3, ENDED)
    steps = iterable.in_step(reading())
    assert next(steps) == 0 and read == [0, 1]
    assert next(steps) == 1 and read == [0, 1, 2]
    steps.close()


def test_votes_of_real_groups_travel_in_a_group_of_their_own(process_group):
    communicator = comm.for_type("MULTI_CPU")
    assert iterable._vote(communicator, [7, 2, ENDED])() == [[7, 2, ENDED]]
    assert iterable._groups[communicator] is not communicator.group
