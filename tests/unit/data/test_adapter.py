"""The wrapper around a torch loader."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from accelerate.data import adapter
from accelerate.data.adapter import (
    CPU,
    DataLoaderAdapter,
    as_stateful,
    keep_on_cpu,
    placer,
    variant,
)
from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.loader import DataLoaderShard
from loader_samples import SizedStream, Stream, needs_torchdata

DATA = TensorDataset(torch.arange(10))


class Custom(DataLoader):
    extra = "kept"

    def __iter__(self):
        for batch in super().__iter__():
            yield [-part for part in batch]


def test_it_passes_as_the_loader_it_wraps():
    wrapper = DataLoaderAdapter(DATA, batch_size=4)
    assert isinstance(wrapper, DataLoader) and isinstance(wrapper, DataLoaderAdapter)
    assert wrapper.num_workers == 0 and wrapper.dataset is DATA and len(wrapper) == 3
    with pytest.raises(AttributeError, match="'DataLoaderAdapter' object has no attribute 'nothing'"):
        _ = wrapper.nothing


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


def test_states_of_plain_loaders_are_refused():
    with pytest.raises(AttributeError, match="use_stateful_dataloader=True"):
        DataLoaderAdapter(DATA, batch_size=4).state_dict()


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


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": None}])
def test_the_sampler_can_be_replaced(options):
    for loader in (DataLoader(DATA, **options), prepared(DataLoader(DATA, **options))):
        base = getattr(loader, "base_dataloader", loader)
        adapter.set_sampler(base, SequentialSampler(range(2)))
        seen = torch.cat([batch[0].view(-1) for batch in loader]).tolist()
        assert set(seen) <= {0, 1} and len(seen) >= 1


def test_a_hidden_sampler_cannot_be_replaced():
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


def test_the_number_of_samples_is_that_of_the_sampler():
    assert adapter.samples_per_epoch(DataLoader(DATA, 4)) == 10
    assert adapter.samples_per_epoch(DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=7))) == 7
    assert adapter.samples_per_epoch(DataLoader(DATA, batch_sampler=[[0, 1]])) == 10
    assert adapter.samples_per_epoch(prepared(DataLoader(SizedStream(), 4)).base_dataloader) == 10
    assert adapter.samples_per_epoch(DataLoader(Stream(), 4)) is None


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


# -- batches on their device ------------------------------------------------------------------------------------------------


def test_flat_batches_on_the_cpu_are_returned_themselves():
    tensor = torch.zeros(2)
    for batch in (tensor, {"x": tensor, "y": tensor}, [tensor, tensor], (tensor,)):
        assert keep_on_cpu(batch) is batch


def test_other_batches_are_looked_through():
    batch = {"x": {"y": torch.zeros(2)}, "text": "a", "meta": [torch.ones(1, device="cpu"), 3]}
    kept = keep_on_cpu(batch)
    assert torch.equal(kept["x"]["y"], torch.zeros(2)) and kept["text"] == "a" and kept["meta"][1] == 3


def test_the_function_is_chosen_by_device():
    assert placer(None) is None
    assert placer("cpu") is placer(CPU) is keep_on_cpu
    moved = placer(torch.device("meta"), non_blocking=True)({"x": torch.zeros(2), "n": 1})
    assert moved["x"].device.type == "meta" and moved["n"] == 1
