"""The data plan against what really happens: every shard is iterated and its samples are counted."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from accelerate.data import reading
from accelerate.data.build import prepare_data_loader
from accelerate.data.loader import DataLoaderShard
from accelerate.data.samplers import SeedableRandomSampler
from accelerate.extensions.data_plan.method import plan_of
from dispatch_samples import dispatched
from loader_samples import Numbers, SizedStream, Stream


class Rows(Numbers):
    def __getitem__(self, index):
        return torch.tensor(index)


def counted(parts):
    """Of all shards' batches: samples seen first, samples seen again, and batches, for every shard."""
    seen, found = set(), [[0, 0, 0] for _ in parts]
    # In the order of the rounds: what completes a round comes after all that is new in it.
    for number, round_ in enumerate(itertools.zip_longest(*parts)):
        for shard, batch in enumerate(round_):
            if batch is None:
                continue
            found[shard][2] += 1
            for sample in batch:
                found[shard][0 if sample not in seen else 1] += 1
                seen.add(sample)
        assert number < 100
    return [tuple(part) for part in found]


def told(plans):
    """What the plans of all shards say; they agree with each other."""
    assert all(one.shards == plans[0].shards for one in plans)
    return [(shard.samples, shard.duplicates, shard.batches) for shard in plans[0].shards]


def iterate(loader):
    return [batch.view(-1).tolist() for batch in loader]


def check(make, shards, kept, length, **options):
    loaders = [
        prepare_data_loader(make(), num_processes=shards, process_index=index, **options) for index in range(shards)
    ]
    plans = [plan_of(loader) for loader in loaders]
    found = counted([iterate(loader) for loader in loaders])
    assert told(plans) == found, (plans[0], found)
    assert plans[0].samples == sum(samples for samples, _, _ in found)
    assert plans[0].duplicates == sum(duplicates for _, duplicates, _ in found)
    assert plans[0].dropped == kept - plans[0].samples and plans[0].dataset_length == length
    assert [one.own.index for one in plans] == list(range(shards))
    return plans[0]


@pytest.mark.parametrize(("stream", "even_batches"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("split_batches", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore")  # torch compares what a stream yields with its length
def test_the_numbers_are_true(shards, drop_last, split_batches, stream, even_batches):
    options = {"split_batches": split_batches, "even_batches": even_batches}
    # Up to a round of the largest share and a rest.
    for length, share in itertools.product(range(0, 6 * shards + 2, 1 if shards < 3 else 3), (1, 2, 3, 5)):
        size = share * shards if split_batches else share
        data = SizedStream if stream else Rows
        found = check(lambda: DataLoader(data(length), size, drop_last=drop_last), shards, length, length, **options)  # noqa: B023
        assert (found.batch_size, found.total_batch_size) == (share, share * shards)
        assert (
            found.drop_last is drop_last
            and not found.ends_by_vote
            and found.kind == ("stream" if stream else "map-style")
        )
        assert {shard.read for shard in found.shards} == {1.0 if stream else 1 / shards}


@pytest.mark.parametrize("split_batches", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_the_numbers_of_dispatched_data_are_true(shards, drop_last, split_batches):
    for length in range(26):
        for share in (1, 2, 3):
            size = share * shards if split_batches else share
            sent, want = [], []
            for rank in range(shards):
                source = DataLoader(Rows(length), size, drop_last=drop_last)
                loader = dispatched(source, sent, shards, rank, split_batches=split_batches)
                data_plan, steps = plan_of(loader), [(len(batch), loader.batch_counts) for batch in loader]
                real = sum(samples if counts is None else counts[rank] for samples, counts in steps)
                want.append((real, sum(samples for samples, _ in steps) - real, len(steps)))
            assert told([data_plan]) == want, (length, size, drop_last)
            assert data_plan.reading == reading.Dispatched.name
            assert [shard.read for shard in data_plan.shards] == [1.0] + [0.0] * (shards - 1)


@pytest.mark.parametrize(
    ("loader", "length", "size"),
    [
        (DataLoader(Rows(6), batch_sampler=[[0], [1, 2, 3], [4, 5]]), 6, None),
        (DataLoader(Stream(6), 2), None, 2),
        (DataLoader(SizedStream(6), 2, num_workers=2), 6, 2),  # each worker makes of the stream what it likes
    ],
    ids=["custom batch sampler", "stream", "stream in workers"],
)
def test_what_is_not_known_is_not_promised(loader, length, size):
    found = plan_of(prepare_data_loader(loader, num_processes=2, process_index=0))
    assert found.own.batches is found.samples is found.duplicates is found.dropped is None
    assert (found.dataset_length, found.batch_size) == (length, size)
    assert "unknown" in str(found) and "unknown" in found.summary
    assert f"workers: {loader.num_workers} per process" in found.summary


def test_of_a_stream_divided_by_the_user_only_the_own_part_is_known():
    loader = prepare_data_loader(
        DataLoader(SizedStream(7), 2), num_processes=2, process_index=1, shard_iterable_dataset=False
    )
    found = plan_of(loader)
    assert (
        found.reading == reading.AlreadySplit.name
        and found.ends_by_vote
        and found.samples is found.dataset_length is None
    )
    assert [shard.samples for shard in found.shards] == [None, 7] and found.own.batches == 4
    assert "stop when the first shard ends" in str(found) and "stop when the first shard ends" in found.summary


@pytest.mark.filterwarnings("ignore:.*gives part")
@pytest.mark.parametrize("sampler_drops", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_the_numbers_of_a_distributed_sampler_are_true(shards, drop_last, sampler_drops):
    for length in range(shards, 14):
        loaders = []
        for rank in range(shards):
            sampler = DistributedSampler(Rows(length), shards, rank, shuffle=False, drop_last=sampler_drops)
            source = DataLoader(Rows(length), 2, sampler=sampler, drop_last=drop_last)
            loaders.append(prepare_data_loader(source, num_processes=shards, process_index=rank))
        plans = [plan_of(loader) for loader in loaders]
        assert told(plans) == counted([iterate(loader) for loader in loaders]), (length, plans[0])
        assert plans[0].dropped == length - plans[0].samples and not plans[0].ends_by_vote


def test_the_parts_of_a_custom_sampler_are_known_to_their_rank_only():
    loader = DataLoader(Rows(4), batch_sampler=[[0], [1, 2]])
    found = plan_of(prepare_data_loader(loader, num_processes=2, process_index=1, already_sharded=True))
    assert found.reading == reading.AlreadySplit.name and found.ends_by_vote and found.parts == 2


@pytest.mark.parametrize("loader", [DataLoader(Rows(4)), [1], None, DataLoaderShard(Rows(4), batch_size=2)])
def test_a_loader_that_was_not_prepared_has_no_plan(loader):
    with pytest.raises(TypeError, match=r"was not prepared.*accelerator\.prepare\(loader\)"):
        plan_of(loader)


def test_the_table_is_that_of_the_guide():
    loader = prepare_data_loader(DataLoader(Rows(10), 2, shuffle=True), num_processes=2, process_index=0)
    assert str(plan_of(loader)) == TABLE


@pytest.mark.parametrize("batched", [True, False])
def test_a_custom_sampler_is_walked_and_the_plan_says_so(batched):
    class Custom(SequentialSampler):
        pass

    def planned(sampler, processes=2):
        loader = DataLoader(Rows(10), 2 if batched else None, sampler=sampler)
        return plan_of(prepare_data_loader(loader, num_processes=processes, process_index=0))

    line = "find     each process goes through the batches of all, because the sampler is a custom one"
    assert planned(Custom(range(10))).walked and line in str(planned(Custom(range(10)))).splitlines()
    for sampler in (SequentialSampler(range(10)), RandomSampler(range(10)), SeedableRandomSampler(range(10))):
        assert not planned(sampler).walked and "find" not in str(planned(sampler))
    assert not planned(Custom(range(10)), processes=1).walked


TABLE = """\
data     map-style, 10 samples
read     own shard by index
order    RandomSampler
epoch    10 samples, 2 duplicates, 0 dropped
batch    2 per process, 4 in total
workers  0 per process
shard  ranks  samples  duplicates  batches  reads
0      0      6        0           3        50%
1      1      4        2           3        50%"""
