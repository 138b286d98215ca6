"""The wrapper around a torch loader."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from accelerate.data import adapter
from accelerate.data.adapter import DataLoaderAdapter, as_stateful
from accelerate.data.build import prepare_data_loader, skip_first_batches
from loader_samples import Stream, needs_torchdata

DATA = TensorDataset(torch.arange(10))


def test_it_passes_as_the_loader_it_wraps():
    wrapper = DataLoaderAdapter(DATA, batch_size=4)
    assert isinstance(wrapper, DataLoader) and isinstance(wrapper, DataLoaderAdapter)
    assert wrapper.num_workers == 0 and wrapper.dataset is DATA and len(wrapper) == 3
    with pytest.raises(AttributeError, match="'DataLoaderAdapter' object has no attribute 'nothing'"):
        _ = wrapper.nothing


@needs_torchdata
@pytest.mark.filterwarnings("error:pin_memory_device")
def test_a_stateful_twin_has_the_settings():
    generator = torch.Generator()
    loader = DataLoader(
        DATA, 4, num_workers=2, collate_fn=list, persistent_workers=True, prefetch_factor=5, generator=generator
    )
    twin = as_stateful(loader)
    assert twin.collate_fn is list and twin.generator is generator and twin.batch_sampler is loader.batch_sampler
    assert (twin.num_workers, twin.persistent_workers, twin.prefetch_factor) == (2, True, 5)


def test_without_torchdata_stateful_loaders_are_refused(monkeypatch):
    monkeypatch.setattr("accelerate.data.adapter.is_torchdata_stateful_dataloader_available", lambda: False)
    with pytest.raises(ImportError, match="torchdata"):
        DataLoaderAdapter(DATA, use_stateful_dataloader=True)


# -- questions --------------------------------------------------------------------------------------------------------------


def prepared(loader, **options):
    return prepare_data_loader(loader, num_processes=2, process_index=0, **options)


def test_the_sampler_is_found_below_all_wrapping():
    sampler = RandomSampler(DATA)
    loader = DataLoader(DATA, 4, sampler=sampler)
    assert adapter.get_sampler(loader) is sampler
    assert adapter.get_sampler(skip_first_batches(prepared(loader), 1)) is sampler
    assert adapter.get_sampler(DataLoader(DATA, batch_size=None, sampler=sampler)) is sampler
    assert adapter.get_sampler(prepared(DataLoader(DATA, batch_size=None, sampler=sampler))) is sampler
    assert adapter.get_sampler(DataLoader(DATA, batch_sampler=[[0, 1]])) is None


@pytest.mark.parametrize(("batch_size", "of_the_first_shard"), [(4, [0, 1, 0, 1]), (None, [0])])
def test_the_sampler_can_be_replaced(batch_size, of_the_first_shard):
    whole = DataLoader(DATA, batch_size)
    for loader, want in ((prepared(whole), of_the_first_shard), (whole, [0, 1])):
        adapter.set_sampler(getattr(loader, "base_dataloader", loader), SequentialSampler(range(2)))
        assert torch.cat([batch[0].view(-1) for batch in loader]).tolist() == want
    with pytest.raises(ValueError, match="has no `sampler`"):
        adapter.set_sampler(DataLoader(DATA, batch_sampler=[[0, 1]]), SequentialSampler(DATA))


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
    assert adapter.global_batch_size(loader.base_dataloader) == size
    assert loader._samples_per_step() == size
    if size is None:
        with pytest.raises(TypeError, match="has no batch_size"):
            _ = loader.total_batch_size
    else:
        assert loader.total_batch_size == size


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
