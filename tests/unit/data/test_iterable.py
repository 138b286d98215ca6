"""Sharding of streams."""

from itertools import chain, cycle, islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate.data import iterable
from accelerate.data.iterable import (
    IterableDatasetShard,
    PlainStream,
    can_shard_itself,
    check_split,
    differs_between_ranks,
    is_datapipe,
    is_split_by_node,
    pieces,
    share_of_pieces,
    share_of_split,
)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class SizedStream(Stream):
    def __len__(self):
        return self.length


@given(st.integers(0, 50), st.integers(1, 6), st.booleans(), st.integers(1, 4), st.booleans())
def test_a_shard_holds_its_part_of_every_round(length, share, drop_last, shards, split):
    size = share * shards
    rounds = [list(range(length))[at : at + size] for at in range(0, length, size)]
    counts = None
    if rounds and len(rounds[-1]) < size:
        last = rounds.pop()
        if not drop_last:
            counts = tuple(len(last[share * shard : share * (shard + 1)]) for shard in range(shards))
            rounds.append(list(islice(chain(last, cycle(range(length)[:size])), size)))
    for index in range(shards):
        shard = IterableDatasetShard(SizedStream(length), size if split else share, drop_last, shards, index, split)
        want = list(chain.from_iterable(part[share * index : share * (index + 1)] for part in rounds))
        assert list(shard) == want and len(shard) == len(want)
        assert list(shard.round_log.padded.values()) == ([] if counts is None else [counts])


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
    assert not is_split_by_node(split(4), 2) and not is_split_by_node(Stream(1), 2)
    assert not is_split_by_node(split(1), 1), "with one shard there is nothing to divide"


def test_a_stream_divided_among_others_is_refused():
    check_split(split(2, rank=1), 2, 1)
    check_split(split(1), 4, 3)
    check_split(split(4), 1, 0)
    check_split(Stream(1), 4, 3)
    with pytest.raises(
        ValueError, match=r"divided among 4 nodes.*2 data shards.*world_size=2.*shard_iterable_dataset"
    ):
        check_split(split(4), 2, 1)
    with pytest.warns(UserWarning, match=r"part of rank 0 .*reads shard 1"):
        check_split(split(2, rank=0), 2, 1)


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
    monkeypatch.setattr(iterable, "_torch_world_size", lambda: 2)
    assert is_split_by_node(filtered, 2) and not is_split_by_node(numbers, 2) and not is_split_by_node(filtered, 3)
    assert list(PlainStream(numbers)) == [0, 1, 2, 3] and len(PlainStream(numbers)) == 4


def test_streams_in_enough_pieces_divide_themselves():
    dataset = SimpleNamespace(num_shards=3, shard=lambda **_: None)
    assert can_shard_itself(dataset, 3) and not can_shard_itself(dataset, 4)
    assert can_shard_itself(SimpleNamespace(n_shards=3, shard=lambda **_: None), 3), "the older name"
    assert not can_shard_itself(Stream(1), 1)
    assert pieces(dataset, 2) == [None, None], "how another library divides is not known"
    assert share_of_pieces(dataset, 0, 3) == 1 / 3 and share_of_pieces(dataset, 0, 2) is None
    assert share_of_split(dataset, 0, 3) is None


def stored(shards, **options):
    datasets = pytest.importorskip("datasets")

    def read(numbers):
        for number in numbers:
            for row in range(3 + number):
                yield {"x": 10 * number + row}

    stream = datasets.IterableDataset.from_generator(read, gen_kwargs={"numbers": list(range(shards))})
    return stream.shuffle(buffer_size=4, **options) if options else stream


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_pieces_are_those_that_datasets_gives(count, shards):
    stream = stored(count)
    if not can_shard_itself(stream, shards):
        assert count < shards
        return
    parts = [[row["x"] for row in stream.shard(num_shards=shards, index=index)] for index in range(shards)]
    assert [sorted({value // 10 for value in part}) for part in parts] == list(map(list, pieces(stream, shards)))
    assert sorted(sum(parts, [])) == sorted(row["x"] for row in stream), "nothing lost, nothing doubled"
    assert sum(share_of_pieces(stream, index, shards) for index in range(shards)) == pytest.approx(1)


def test_the_share_that_a_split_stream_reads():
    split_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
    by_pieces = split_by_node(stored(4), rank=1, world_size=2)
    by_samples = split_by_node(stored(3), rank=1, world_size=2)
    assert is_split_by_node(by_pieces, 2) and is_split_by_node(by_samples, 2)
    assert [share_of_split(one, 1, 2) for one in (by_pieces, by_samples)] == [0.5, 1.0]


def test_shuffling_without_a_seed_is_noticed():
    def gathered(*states):
        return lambda own: [own, *states] if states else [own, own]

    assert not differs_between_ranks(stored(2, seed=3), gathered())
    assert differs_between_ranks(stored(2, seed=3), gathered(["another"]))
    assert not differs_between_ranks(stored(2), gathered(["never asked"]))
    assert not differs_between_ranks(Stream(2), gathered(["never asked"]))
    unseeded, states = stored(2, seed=None), []
    differs_between_ranks(unseeded, lambda own: states.append(own) or [own])
    differs_between_ranks(stored(2, seed=None), lambda own: states.append(own) or [own])
    assert states[0] != states[1]
