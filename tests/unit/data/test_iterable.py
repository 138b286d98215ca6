"""Sharding of streams."""

from itertools import chain, cycle, islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from accelerate.data.iterable import IterableDatasetShard, can_shard_itself, is_split_by_node


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


def test_streams_that_are_divided_already_are_recognised():
    dataset = SimpleNamespace(_distributed=SimpleNamespace(rank=0, world_size=2))
    assert is_split_by_node(dataset, 2)
    assert not is_split_by_node(dataset, 4) and not is_split_by_node(Stream(1), 2)


def test_streams_in_enough_pieces_divide_themselves():
    dataset = SimpleNamespace(num_shards=3, shard=lambda **_: None)
    assert can_shard_itself(dataset, 3) and not can_shard_itself(dataset, 4)
    assert not can_shard_itself(Stream(1), 1)
