"""Samplers against enumerated truth: where each sample goes, position by position, over every small case."""

from itertools import product

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.samplers import BatchSamplerShard, SkipBatchSampler, batches_from, skips_samples
from loader_samples import SizedStream, Stream

LENGTHS, SIZES, WORLDS, FLAGS = range(10), (1, 2, 3), (1, 2, 3), (False, True)


def dealt(samples, size, world, rank, drop_last=False, even=True, behind=0):
    """The batches of one rank: in round r, place j of its batch holds the sample number r * size * world + rank * size + j.

    Places after the end stay empty, or are filled with the first samples of the first round, over and over.
    """
    total, count = size * world, len(samples) - behind
    batches = []
    for start in range(0, count, total):
        if drop_last and start + total > count:
            break
        batch = []
        for place in range(start + rank * size, start + rank * size + size):
            if place < count:
                batch.append(samples[behind + place])
            elif even:
                batch.append(samples[(place - count) % min(total, len(samples))])
        if batch:
            batches.append(batch)
    return batches


def real(length, size, world, drop_last, even, behind=0):
    """Which round is completed with duplicates, if any, and how many samples of each rank's batch are real there."""
    count = max(0, length - behind)
    rounds, rest = divmod(count, size * world)
    if not rest or drop_last or not even:
        return {}
    return {rounds: tuple(sum(place < rest for place in range(r * size, r * size + size)) for r in range(world))}


@pytest.mark.parametrize("sequential", FLAGS)
@pytest.mark.parametrize("split", FLAGS)
def test_samples_may_be_skipped_beyond_whole_batches(split, sequential):
    """Another number of processes has consumed samples that are no whole steps here."""
    for length, size, world, drop_last, even in product(LENGTHS, (1, 2), WORLDS, FLAGS, FLAGS):
        samples = list(range(length)) if sequential else list(range(100, 100 + length))
        for rank, skip, extra in product(range(world), range(3), range(size * world)):
            behind = skip * size * world + extra
            expected = dealt(samples, size, world, rank, drop_last, even, behind)
            inner = BatchSampler(
                SequentialSampler(samples) if sequential else samples, size * world if split else size, drop_last
            )
            shard = BatchSamplerShard(inner, world, rank, split_batches=split, even_batches=even)
            skipping = SkipBatchSampler(shard, skip, extra)
            case = (length, size, world, drop_last, even, rank, skip, extra)
            assert list(skipping) == expected, case
            padded = real(length, size, world, drop_last, even, behind)
            assert shard.round_log == {skip + number: counts for number, counts in padded.items()}, case
            assert extra or len(skipping) == len(expected), case
            # A view of it omits whole batches of what remains.
            nested = SkipBatchSampler(skipping, 1)
            assert list(nested) == expected[1:], case


def test_plain_batch_samplers_are_skipped_by_batches_and_samples():
    for length, size, drop_last, skip, extra in product(LENGTHS, SIZES, FLAGS, range(4), range(4)):
        skipping = SkipBatchSampler(BatchSampler(range(length), size, drop_last), skip, extra)
        expected = dealt(range(length), size, 1, 0, drop_last, even=False, behind=skip * size + extra)
        assert list(skipping) == expected, (length, size, drop_last, skip, extra)
        assert extra or len(skipping) == len(expected), (length, size, drop_last, skip)
        assert skipping.batch_size == size and skipping.total_length == len(skipping.batch_sampler)


def test_where_samples_can_be_skipped_is_told():
    batches = BatchSampler(range(12), 2, False)
    shard = BatchSamplerShard(batches, 2, 1)
    assert skips_samples(batches) and skips_samples(shard) and skips_samples(SkipBatchSampler(shard, 1))
    # A shard of what was skipped beforehand, of lists, or of a sampler of another kind continues at whole batches.
    for inner in (
        SkipBatchSampler(batches, 1),
        list(batches),
        type("Custom", (BatchSampler,), {})(range(12), 2, False),
    ):
        assert not skips_samples(BatchSamplerShard(inner, 2, 1))
        shard, expected = BatchSamplerShard(inner, 2, 1), list(BatchSamplerShard(list(inner), 2, 1))
        for start in range(len(expected) + 2):
            assert list(batches_from(shard, start)) == list(SkipBatchSampler(shard, start)) == expected[start:]
            assert len(SkipBatchSampler(shard, start)) == len(expected[start:])


@pytest.mark.parametrize("split", FLAGS)
@pytest.mark.parametrize(
    "dataset", [lambda length: list(range(length)), Stream, SizedStream], ids=["map", "s", "sized"]
)
def test_prepared_loaders_from_every_start(dataset, split):
    """The view that omits k batches yields the tail, and knows end, remainder, real samples and its length."""
    for length, size, world, drop_last in product(LENGTHS, (1, 2), WORLDS, FLAGS):
        even = world > 1  # a single process has no other to be even with, so torch's own short last batch stays
        padded = real(length, size, world, drop_last, even)
        rest = 0 if drop_last else length % (size * world)
        for rank in range(world):
            expected = dealt(range(length), size, world, rank, drop_last, even)
            whole = prepare_data_loader(
                DataLoader(dataset(length), size * world if split else size, drop_last=drop_last),
                num_processes=world,
                process_index=rank,
                split_batches=split,
            )
            for skip in range(len(expected) + 1):
                case = (length, size, world, drop_last, rank, skip)
                view = skip_first_batches(whole, skip)
                if dataset is not Stream:
                    assert len(view) == len(expected[skip:]), case
                seen = []
                for number, batch in enumerate(view, skip):
                    seen.append(batch.tolist())
                    assert view.batch_counts == padded.get(number), case
                    assert view.end_of_dataloader is (number == len(expected) - 1), case
                    if view.end_of_dataloader and not drop_last and world > 1:
                        assert view.remainder in ((rest,) if rest else (0, -1)), case
                assert seen == expected[skip:], case
                assert whole.iteration == skip + 1, case


def test_unbatched_loaders_from_every_start():
    for length, world in product(LENGTHS, WORLDS):
        for rank in range(world):
            expected = [sample for (sample,) in dealt(range(length), 1, world, rank)]
            loader = DataLoader(list(range(length)), batch_size=None)
            loader = prepare_data_loader(loader, num_processes=world, process_index=rank)
            for skip in range(len(expected) + 1):
                assert list(skip_first_batches(loader, skip)) == expected[skip:]
