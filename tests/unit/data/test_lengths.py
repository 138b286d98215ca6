"""Questions about loaders."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from accelerate.data import lengths
from accelerate.data.build import prepare_data_loader
from accelerate.data.shards import SkipBatchSampler
from accelerate.data.skip import skip_first_batches

DATA = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class SizedStream(Stream):
    def __len__(self):
        return 10


def prepared(loader, **options):
    return prepare_data_loader(loader, num_processes=2, process_index=0, **options)


def test_the_sampler_is_found_below_all_wrapping():
    sampler = RandomSampler(DATA)
    loader = DataLoader(DATA, 4, sampler=sampler)
    assert lengths.get_sampler(loader) is sampler
    assert lengths.get_sampler(skip_first_batches(prepared(loader), 1)) is sampler
    assert lengths.get_sampler(DataLoader(DATA, batch_size=None, sampler=sampler)) is sampler
    assert lengths.get_sampler(prepared(DataLoader(DATA, batch_size=None, sampler=sampler))) is sampler
    assert lengths.get_sampler(DataLoader(DATA, batch_sampler=[[0, 1]])) is None


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": None}])
def test_the_sampler_can_be_replaced(options):
    for loader in (DataLoader(DATA, **options), prepared(DataLoader(DATA, **options))):
        base = getattr(loader, "base_dataloader", loader)
        lengths.set_sampler(base, SequentialSampler(range(2)))
        seen = torch.cat([batch[0].view(-1) for batch in loader]).tolist()
        assert set(seen) <= {0, 1} and len(seen) >= 1


def test_a_hidden_sampler_cannot_be_replaced():
    with pytest.raises(ValueError, match="has no `sampler`"):
        lengths.set_sampler(DataLoader(DATA, batch_sampler=[[0, 1]]), SequentialSampler(DATA))


@pytest.mark.parametrize(
    ("loader", "options", "size"),
    [
        (DataLoader(DATA, 4), {}, 8),
        (DataLoader(DATA, 4), {"split_batches": True}, 4),
        (DataLoader(Stream(), 4), {}, 8),
        (DataLoader(Stream(), 4), {"split_batches": True}, 4),
        (DataLoader(DATA, batch_size=None), {}, 2),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), {}, None),
    ],
)
def test_batch_size_over_all_shards(loader, options, size):
    loader = prepared(loader, **options)
    assert lengths.global_batch_size(loader.base_dataloader) == size
    assert loader._samples_per_step() == size
    if size is None:
        with pytest.raises(TypeError, match="has no batch_size"):
            _ = loader.total_batch_size
    else:
        assert loader.total_batch_size == size


def test_the_number_of_samples_is_that_of_the_sampler():
    assert lengths.samples_per_epoch(DataLoader(DATA, 4)) == 10
    assert lengths.samples_per_epoch(DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=7))) == 7
    assert lengths.samples_per_epoch(DataLoader(DATA, batch_sampler=[[0, 1]])) == 10
    assert lengths.samples_per_epoch(prepared(DataLoader(SizedStream(), 4)).base_dataloader) == 10
    assert lengths.samples_per_epoch(DataLoader(Stream(), 4)) is None


def test_a_stream_has_no_length():
    loader = prepared(DataLoader(Stream(), 4))
    with pytest.raises(TypeError, match=r"\(Stream\) has no __len__"):
        _ = loader.total_dataset_length
    assert prepared(DataLoader(SizedStream(), 4)).total_dataset_length == 10


def test_everybody_who_wants_hears_the_epoch_once():
    heard = []

    class Sampler(SequentialSampler):
        def set_epoch(self, epoch):
            heard.append(("sampler", epoch))

    class Batches(BatchSampler):
        def set_epoch(self, epoch):
            heard.append(("batches", epoch))

    class Data(TensorDataset):
        def set_epoch(self, epoch):
            heard.append(("data", epoch))

    loader = prepared(DataLoader(Data(torch.arange(8)), batch_sampler=Batches(Sampler(range(8)), 2, False)))
    skip_first_batches(loader, 1).set_epoch(3)
    assert heard == [("batches", 3), ("sampler", 3), ("data", 3)]
    assert loader.iteration == 3


def test_skipped_batches_add_up():
    loader = DataLoader(DATA, batch_sampler=SkipBatchSampler(SkipBatchSampler(BatchSampler(range(9), 2, False), 1), 2))
    assert lengths.skipped_batches(loader) == 3
