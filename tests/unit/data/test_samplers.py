"""Random orders that can be drawn again, and batch samplers that are divided among processes."""

import pickle
from itertools import cycle, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate.data.samplers import (
    BatchSamplerShard,
    ReplayableRandomSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
    batches_from,
)


@pytest.mark.parametrize("options", [{}, {"num_samples": 5}, {"replacement": True, "num_samples": 70}])
def test_adopted_sampler_draws_what_the_plain_one_draws(options):
    torch.manual_seed(3)
    plain = RandomSampler(range(40), **options)
    want, after = [list(plain), list(plain)], torch.rand(1)
    torch.manual_seed(3)
    adopted = RandomSampler(range(40), **options)
    ReplayableRandomSampler.adopt(adopted)
    assert [list(adopted), list(adopted)] == want
    assert torch.rand(1) == after and adopted.generator is None


# -- sharding of batch samplers; test_truth_samplers.py has every small case ---------------------------------------------


class Varying:
    """A batch sampler with batches of varying size."""

    def __init__(self, sizes):
        numbers = iter(range(sum(sizes)))
        self.batches = [list(islice(numbers, size)) for size in sizes]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@given(sizes=st.lists(st.integers(1, 5), max_size=9), shards=st.integers(1, 4), even=st.booleans())
def test_batches_of_any_size_are_taken_in_turn(sizes, shards, even):
    batches = list(Varying(sizes))
    for index in range(shards):
        shard = BatchSamplerShard(Varying(sizes), shards, index, even_batches=even)
        filled = batches
        if even and batches:
            filled = batches + list(islice(cycle(batches[:shards]), -len(batches) % shards))
        assert list(shard) == filled[index::shards]
        assert len(shard) == len(filled[index::shards])


@given(sizes=st.lists(st.integers(1, 6), max_size=9), shards=st.integers(1, 3), split=st.booleans())
def test_a_sampler_that_breaks_its_batch_size_loses_nothing(sizes, shards, split):
    def shard(index):
        inner = Varying(sizes)
        inner.batch_size = 2 * shards if split else 2
        return BatchSamplerShard(inner, shards, index, split_batches=split)

    seen, steps = [], set()
    for index in range(shards):
        part = shard(index)
        batches = list(part)
        steps.add(len(batches))
        for number, batch in enumerate(batches):
            counts = part.round_log.get(number)
            seen += batch if counts is None else batch[: counts[index]]
    assert sorted(seen) == list(range(sum(sizes)))
    assert len(steps) <= 1, "all shards take the same number of steps"


def test_samplers_pickle_by_the_public_path():
    shard = BatchSamplerShard(BatchSampler(SeedableRandomSampler(range(4), data_seed=1), 2, False), 2, 1)
    pickled = pickle.dumps(shard)
    assert b"accelerate.data_loader" in pickled and b"accelerate.data.samplers" not in pickled
    assert list(pickle.loads(pickled)) == list(shard)


def test_skipping_a_sequential_sampler_builds_nothing():
    def counted(size):
        for index in range(size):
            drawn.append(index)
            yield index

    drawn = []
    sampler = SequentialSampler(range(1_000_000_000))
    shard = BatchSamplerShard(BatchSampler(sampler, 4, False), 2, 1)
    assert next(iter(SkipBatchSampler(shard, 100_000_000))) == [800_000_004, 800_000_005, 800_000_006, 800_000_007]
    assert next(batches_from(BatchSampler(counted(100), 4, False), 3)) == [12, 13, 14, 15]
    assert len(drawn) == 16, "an unknown sampler is drawn from, but once only"
