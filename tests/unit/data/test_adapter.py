"""The wrapper around a torch loader."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.data.adapter import DataLoaderAdapter, as_stateful, loader_arguments, stateful_loader_class, variant
from accelerate.data.build import prepare_data_loader
from accelerate.data.loader import DataLoaderShard
from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

needs_torchdata = pytest.mark.skipif(
    not is_torchdata_stateful_dataloader_available(), reason="needs torchdata's StatefulDataLoader"
)
DATA = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Custom(DataLoader):
    extra = "kept"

    def __iter__(self):
        for batch in super().__iter__():
            yield [-part for part in batch]


def test_it_passes_as_the_loader_it_wraps():
    adapter = DataLoaderAdapter(DATA, batch_size=4)
    assert isinstance(adapter, DataLoader) and isinstance(adapter, DataLoaderAdapter)
    assert adapter.num_workers == 0 and adapter.dataset is DATA and len(adapter) == 3
    with pytest.raises(AttributeError, match="'DataLoaderAdapter' object has no attribute 'nothing'"):
        _ = adapter.nothing


def test_the_length_of_a_stream_is_an_error_that_names_the_dataset():
    with pytest.raises(TypeError, match=r"its dataset \(Stream\) has no __len__"):
        len(DataLoaderAdapter(Stream(), batch_size=2))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_work(duplicate):
    loader = prepare_data_loader(DataLoader(DATA, batch_size=4), num_processes=2, process_index=1)
    twin = duplicate(loader)
    assert type(twin) is DataLoaderShard and isinstance(twin, DataLoader)
    assert [batch[0].tolist() for batch in twin] == [[4, 5, 6, 7], [2, 3, 4, 5]]
    assert twin.gradient_state is not None and not twin.gradient_state.in_dataloader


def test_a_variant_keeps_class_and_settings_and_leaves_the_original():
    loader = Custom(DATA, batch_size=4, timeout=3, num_workers=1)
    twin = variant(loader, batch_sampler=[[1, 2]])
    assert type(twin) is Custom and twin.extra == "kept" and twin.timeout == 3
    assert twin.batch_sampler == [[1, 2]] and loader.batch_sampler.batch_size == 4


def test_arguments_build_an_equal_loader():
    def collate(rows):
        return rows

    generator = torch.Generator()
    loader = DataLoader(
        DATA, 4, num_workers=2, collate_fn=collate, persistent_workers=True, prefetch_factor=5, generator=generator
    )
    arguments = loader_arguments(loader)
    assert arguments["collate_fn"] is collate and arguments["generator"] is generator
    assert (arguments["num_workers"], arguments["persistent_workers"], arguments["prefetch_factor"]) == (2, True, 5)
    assert "prefetch_factor" not in loader_arguments(DataLoader(DATA, 4))
    assert isinstance(DataLoader(DATA, 4, **arguments), DataLoader)


def test_without_torchdata_stateful_loaders_are_refused(monkeypatch):
    monkeypatch.setattr("accelerate.data.adapter.is_torchdata_stateful_dataloader_available", lambda: False)
    with pytest.raises(ImportError, match="torchdata"):
        DataLoaderAdapter(DATA, use_stateful_dataloader=True)


def test_states_of_plain_loaders_are_refused():
    with pytest.raises(AttributeError, match="use_stateful_dataloader=True"):
        DataLoaderAdapter(DATA, batch_size=4).state_dict()


@needs_torchdata
@pytest.mark.parametrize(
    "loader",
    [DataLoader(DATA, 4), DataLoader(DATA, batch_size=None), DataLoader(Stream(), 2, drop_last=True)],
    ids=["batches", "samples", "stream"],
)
def test_stateful_twins_yield_the_same(loader):
    twin = as_stateful(loader)
    assert isinstance(twin, stateful_loader_class())
    assert str(list(twin)) == str(list(loader))
    again = as_stateful(twin)
    assert again is not twin and str(list(again)) == str(list(loader))
