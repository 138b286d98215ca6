"""Random orders that can be drawn again, and batch samplers that are divided among processes."""

import pickle
import sys
from itertools import cycle, islice, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accelerate.data.build import prepare_data_loader
from accelerate.data.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    batches_from,
)

# -- an epoch's order as a tensor: the draws are torch's ------------------------------------------------------------------

DATA = range(41)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def sampler_and_torchs_orders(kind, options):
    """A sampler, the orders of two epochs as torch's own sampler draws them, and the state of the generator after them."""
    if kind == "in order":
        return SequentialSampler(DATA), [list(DATA)] * 2, None
    if kind == "seed and epoch":
        draws = [RandomSampler(DATA, generator=seeded(3 + epoch), **options) for epoch in range(2)]
        sampler = SeedableRandomSampler(DATA, data_seed=3, **options)
        return sampler, list(map(list, draws)), draws[1].generator.get_state()
    if kind == "own generator":
        draws = RandomSampler(DATA, generator=seeded(3), **options)
        sampler = RandomSampler(DATA, generator=seeded(3), **options)
        return sampler, [list(draws), list(draws)], draws.generator.get_state()
    torch.manual_seed(3)
    draws = RandomSampler(DATA, **options)
    orders = [list(draws), list(draws)]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    return RandomSampler(DATA, **options), orders, state


@pytest.mark.parametrize("kind", ["in order", "seed and epoch", "own generator", "default generator"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_samples": 5}, {"num_samples": 95}, {"replacement": True}, {"replacement": True, "num_samples": 70}],
    ids=str,
)
@pytest.mark.parametrize("split", [False, True])
def test_a_share_that_is_sliced_is_the_one_that_a_walk_finds(kind, options, split):
    for share, drop_last, even, rank, start, extra in product((1, 4), *[(False, True)] * 2, range(3), (0, 2), (0, 5)):
        size = share * 3 if split else share
        sampler, orders, state = sampler_and_torchs_orders(kind, options)
        for order in orders:
            # What a sampler that is a plain list has in store is walked.
            parts = [
                BatchSamplerShard(BatchSampler(one, size, drop_last), 3, rank, split, even) for one in (sampler, order)
            ]
            sliced, walked = (list(SkipBatchSampler(part, start, extra)) for part in parts)
            assert sliced == walked and parts[0].round_log == parts[1].round_log
            assert all(type(index) is int for batch in sliced for index in batch)
            assert start or extra or len(parts[0]) == len(sliced)
        if state is not None:
            reached = torch.get_rng_state() if sampler.generator is None else sampler.generator.get_state()
            assert torch.equal(reached, state)


@pytest.mark.parametrize("options", [{}, {"num_samples": 95}, {"replacement": True, "num_samples": 70}], ids=str)
def test_a_loop_that_is_left_has_drawn_what_torch_has_drawn(options):
    """So the next epoch has the same order, wherever the program leaves the one before."""
    for batches in range(1, 6):
        sampler, torchs = (RandomSampler(DATA, generator=seeded(3), **options) for _ in range(2))
        list(islice(BatchSamplerShard(BatchSampler(sampler, 4, False), 3, 1), batches))
        list(islice(torchs, batches * 12))
        assert torch.equal(sampler.generator.get_state(), torchs.generator.get_state())


def test_with_replacement_an_order_is_drawn_at_once_where_nobody_else_has_the_generator():
    """Or each batch would cost a rank what all of them draw for it."""
    options = {"replacement": True, "num_samples": 95}
    torch.manual_seed(3)
    sampler = RandomSampler(DATA, **options)
    loader = prepare_data_loader(DataLoader(DATA, 4, sampler=sampler), num_processes=2, process_index=1)
    torchs = RandomSampler(DATA, generator=torch.Generator(), **options)
    torchs.generator.set_state(sampler.generator.get_state())
    order, batches = list(torchs), iter(loader)
    assert next(batches).tolist() == order[4:8]
    assert torch.equal(sampler.generator.get_state(), torchs.generator.get_state())
    assert next(batches).tolist() == order[12:16]


def test_the_number_of_parts_may_be_set_after_preparing():
    """The Trainer does so to take the sharding back."""
    loader = prepare_data_loader(DataLoader(DATA, 4, shuffle=True), num_processes=3, process_index=1)
    shard = loader.batch_sampler
    assert isinstance(shard.batch_sampler, BatchSampler) and isinstance(shard.batch_sampler.sampler, RandomSampler)
    shard.num_processes, shard.process_index = 1, 0
    assert len(shard) == len(list(shard)) == 11 and sorted({index for batch in shard for index in batch}) == list(DATA)


def test_finding_a_batch_costs_one_rank_nothing_for_the_others():
    """No more Python is run for a batch with 16,384 ranks than with two."""

    def calls(ranks):
        sampler = RandomSampler(range(ranks * 4 * 6))
        batches = iter(BatchSamplerShard(BatchSampler(sampler, 4, False), ranks, ranks // 2))
        next(batches)
        return len(traced(lambda: list(islice(batches, 4))))

    assert calls(16_384) == calls(2)


def traced(function):
    """The lines of Python that a function runs."""
    lines = []

    def trace(frame, event, arg):
        lines.append(event)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


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
