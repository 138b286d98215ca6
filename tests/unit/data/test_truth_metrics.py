"""What an evaluation loop gathers, for any number of processes: the loaders of all ranks side by side in this process."""

from itertools import islice, zip_longest
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.training import collectives
from accelerate.utils import operations
from loader_samples import SizedStream, Stream, dispatched


class Batches:
    """A batch sampler with batches of any size."""

    def __init__(self, sizes):
        numbers = iter(range(sum(sizes)))
        self.batches = [list(islice(numbers, size)) for size in sizes]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def ranks(make, world, dispatch, **options):
    """The prepared loaders of all ranks. A dispatching one has to be run to its end before the next begins."""
    sent = []
    for rank in range(world):
        numbers = {"num_processes": world, "process_index": rank}
        if dispatch:
            yield dispatched(make(), sent, world, rank, **numbers, **options)
        else:
            yield prepare_data_loader(make(), dispatch_batches=False, **numbers, **options)


def steps_of(loader):
    """What one rank knows in each step: its batch, the real samples of all ranks, whether it is the end, and the rest."""
    return [(batch, loader.batch_counts, loader.end_of_dataloader, loader.remainder) for batch in loader]


def gather_for_metrics(parts, counts, end, remainder, objects, **mesh):
    """The library's own function, with the exchange replaced by the parts of all ranks."""
    loader = SimpleNamespace(batch_counts=counts)
    state = SimpleNamespace(active_dataloader=loader, end_of_dataloader=end, remainder=remainder)
    accelerator = SimpleNamespace(gradient_state=state, _communicator=None, **(mesh or {"parallelism_config": None}))

    def gather(_, __):
        return [item for part in parts for item in part.tolist()] if objects else torch.cat(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "gather_object_with" if objects else "gather_with", gather)
        gathered = collectives.gather_for_metrics(accelerator, parts[0], objects)
    return gathered if objects else gathered.tolist()


def evaluated(make, world, dispatch, skip=0, objects=False, **options):
    """What the loop gathers, and what is left of the batches when each is cut to its real samples."""
    told = [steps_of(skip_first_batches(loader, skip)) for loader in ranks(make, world, dispatch, **options)]
    found, counted = [], []
    for step in zip_longest(*told):
        assert None not in step, "all ranks take the same number of steps"
        parts, counts, ends, remainders = zip(*step, strict=True)
        assert len(set(counts)) == len(set(ends)) == len(set(remainders)) == 1, "all ranks know the same"
        found += gather_for_metrics(list(parts), counts[0], ends[0], remainders[0], objects)
        real = [len(part) for part in parts] if counts[0] is None else counts[0]
        counted += [number for part, count in zip(parts, real, strict=True) for number in part[:count].tolist()]
    return found, counted


sources = st.sampled_from((lambda length: list(range(length)), Stream, SizedStream))
worlds = st.sampled_from((1, 2, 3, 4, 5, 8, 16))


@settings(deadline=None, max_examples=300)
@given(
    source=sources,
    length=st.integers(0, 40),
    size=st.integers(1, 6),
    world=worlds,
    drop_last=st.booleans(),
    split=st.booleans(),
    dispatch=st.booleans(),
    objects=st.booleans(),
    skip=st.sampled_from((0, 0, 1, 2)),
)
@example(Stream, 3, 2, 16, False, False, False, False, 0)  # fewer samples than ranks
@example(Stream, 3, 2, 16, False, True, True, True, 0)
@example(SizedStream, 33, 2, 16, False, False, False, True, 1)  # one sample in the last round
def test_each_sample_once_and_in_order(source, length, size, world, drop_last, split, dispatch, objects, skip):
    total = size * world
    kept = length // total * total if drop_last else length
    skip = min(skip, -(-kept // total))

    def make():
        return DataLoader(source(length), batch_size=total if split else size, drop_last=drop_last)

    found, counted = evaluated(make, world, dispatch, skip, objects, split_batches=split)
    assert found == counted == list(range(skip * total, kept))


@pytest.mark.parametrize("source", [lambda length: list(range(length)), Stream])
def test_the_rest_of_a_dispatched_epoch_ends_with_the_same_duplicates(source):
    """What a run trains on after it was resumed includes the duplicates."""

    def batches(skip):
        loaders = ranks(lambda: DataLoader(source(11), batch_size=2), 4, dispatch=True)
        return [[batch.tolist() for batch in skip_first_batches(loader, skip)] for loader in loaders]

    assert batches(1) == [of_rank[1:] for of_rank in batches(0)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=12), worlds, st.booleans())
def test_batches_of_any_size(sizes, world, dispatch):
    def make():
        return DataLoader(range(sum(sizes)), batch_sampler=Batches(sizes))

    assert evaluated(make, world, dispatch, objects=True) == (list(range(sum(sizes))),) * 2


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), worlds, st.booleans())
def test_an_order_of_its_own(length, size, world, drop_last):
    """A batch sampler that draws some samples repeatedly and leaves others out: that is what the dataset is then."""
    chosen = [(5 * number) % 7 for number in range(length)]
    kept = length // (size * world) * size * world if drop_last else length

    def make():
        return DataLoader(range(7), batch_sampler=BatchSampler(chosen, size, drop_last))

    assert evaluated(make, world, dispatch=False) == (chosen[:kept],) * 2


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 4), worlds, st.booleans())
def test_uneven_batches_of_ranks_that_all_have_some(length, size, world, split):
    rest = length % (size * world)
    if 0 < rest <= (world - 1) * size:
        length -= rest

    def make():
        return DataLoader(range(length), batch_size=size * world if split else size)

    found, counted = evaluated(make, world, dispatch=False, objects=True, even_batches=False, split_batches=split)
    assert found == counted == list(range(length))


MESHES = {
    # Two shards of the data; both ranks of a pair have the same batch. Real samples: all of shard 0, one of shard 1.
    "tensor parallel": (SimpleNamespace(non_data_parallel_size=2, tp_size=2), [0, 1, 2]),
    "shared sequences": (SimpleNamespace(non_data_parallel_size=2, tp_size=1), [0, 1, 0, 1, 2, 2]),
}


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize(("counts", "end"), [(None, True), ([2, 1], False)], ids=["last round", "round of a stream"])
@pytest.mark.parametrize("name", MESHES)
def test_what_fills_up_a_round_is_dropped_from_each_rank_of_a_mesh(name, counts, end, objects):
    layout, expected = MESHES[name]
    parts = [torch.tensor(part) for part in ([0, 1], [0, 1], [2, 9], [2, 9])]
    mesh = {"parallelism_config": layout, "torch_device_mesh": object(), "num_processes": 4}
    assert gather_for_metrics(parts, counts, end, 3 if end else -1, objects, **mesh) == expected
