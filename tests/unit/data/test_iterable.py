"""Streams: sharding them, what they say of themselves, and parts that end together."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate.data import iterable
from accelerate.data.iterable import IterableDatasetShard, is_datapipe, is_split_by_node
from cases import cases
from loader_samples import Stream


def test_epochs_reach_the_stream():
    stream = Stream(3)
    stream.generator = torch.Generator()
    shard = IterableDatasetShard(stream)
    with pytest.raises(TypeError):
        len(shard)
    shard.set_epoch(7)
    list(shard)
    assert stream.generator.initial_seed() == 7

    stream.set_epoch = lambda epoch: setattr(stream, "epoch", epoch)
    shard.set_epoch(8)
    list(shard)
    assert stream.epoch == 8 and stream.generator.initial_seed() == 7, "it seeds itself"


def split(world, rank=0, **more):
    return SimpleNamespace(_distributed=SimpleNamespace(rank=rank, world_size=world), **more)


class Holder(IterableDataset):
    """A stream around whatever it is given."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(())


def hf_stream(rank=None):
    datasets, distributed = pytest.importorskip("datasets"), pytest.importorskip("datasets.distributed")
    stream = datasets.Dataset.from_dict({"ids": list(range(8))}).to_iterable_dataset(num_shards=2)
    return stream if rank is None else distributed.split_dataset_by_node(stream, rank, 2)


@cases(
    "around",
    Holder,
    lambda part: Holder(part.map(lambda row: row)),
    lambda part: Holder({"web": [part]}),
    lambda part: ChainDataset([Holder(part)]),
    lambda part: Holder(lambda: iter(part)),
    lambda part: Holder(partial(iter, part)),
    lambda part: Holder(SimpleNamespace(sources=(part,))),
)
def test_divided_stream_is_found_inside_other_objects(around):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_split_by_node(around(hf_stream(rank=1)), 2)
        assert not is_split_by_node(around(hf_stream()), 2)


def test_undivided_stream_next_to_divided_one_warns():
    with pytest.warns(UserWarning, match="reads the undivided streams completely"):
        assert is_split_by_node(Holder([hf_stream(rank=0), hf_stream()]), 2)


def test_a_stream_divided_among_others_is_refused():
    assert is_split_by_node(split(2), 2) and not is_split_by_node(split(1), 4) and not is_split_by_node(split(4), 1)
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


def test_the_buffer_of_a_datasets_stream_is_seen():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"id": list(range(8))}).to_iterable_dataset(num_shards=2)
    assert not iterable.has_buffer(stream)
    assert iterable.has_buffer(stream.shuffle(seed=1, buffer_size=3).map(lambda row: row))
