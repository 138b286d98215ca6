"""The wrapper around a torch loader."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from accelerate.data import adapter
from accelerate.data.adapter import DataLoaderAdapter
from accelerate.data.build import prepare_data_loader, skip_first_batches

DATA = TensorDataset(torch.arange(10))


def test_without_torchdata_stateful_loaders_are_refused(monkeypatch):
    monkeypatch.setattr("accelerate.data.adapter.is_torchdata_stateful_dataloader_available", lambda: False)
    with pytest.raises(ImportError, match="torchdata"):
        DataLoaderAdapter(DATA, use_stateful_dataloader=True)


# -- questions --------------------------------------------------------------------------------------------------------------


def prepared(loader, **options):
    return prepare_data_loader(loader, num_processes=2, process_index=0, **options)


@pytest.mark.parametrize(("batch_size", "of_the_first_shard"), [(4, [0, 1, 0, 1]), (None, [0])])
def test_the_sampler_can_be_replaced(batch_size, of_the_first_shard):
    whole = DataLoader(DATA, batch_size)
    for loader, want in ((prepared(whole), of_the_first_shard), (whole, [0, 1])):
        adapter.set_sampler(getattr(loader, "base_dataloader", loader), SequentialSampler(range(2)))
        assert torch.cat([batch[0].view(-1) for batch in loader]).tolist() == want
    with pytest.raises(ValueError, match="has no `sampler`"):
        adapter.set_sampler(DataLoader(DATA, batch_sampler=[[0, 1]]), SequentialSampler(DATA))


def test_the_sampler_of_a_loader_without_batches():
    sampler = SequentialSampler(DATA)
    assert adapter.get_sampler(DataLoader(DATA, None, sampler=sampler)) is sampler


def test_everybody_who_wants_hears_the_epoch_once():
    heard = []

    def hearing(kind):
        return type("Hearing", (kind,), {"set_epoch": lambda self, epoch: heard.append((kind, epoch))})

    batches = hearing(BatchSampler)(hearing(SequentialSampler)(range(8)), 2, False)
    loader = prepared(DataLoader(hearing(TensorDataset)(torch.arange(8)), batch_sampler=batches))
    skip_first_batches(loader, 1).set_epoch(3)
    assert heard == [(BatchSampler, 3), (SequentialSampler, 3), (TensorDataset, 3)]
    assert loader.iteration == 3
