"""The wrapper around a torch loader."""

import copy
import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from accelerate.data import adapter
from accelerate.data.adapter import DataLoaderAdapter
from accelerate.data.build import prepare_data_loader, skip_first_batches
from loader_samples import needs_torchdata, values

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


def test_everybody_who_wants_hears_the_epoch_once():
    heard = []

    def hearing(kind):
        return type("Hearing", (kind,), {"set_epoch": lambda self, epoch: heard.append((kind, epoch))})

    batches = hearing(BatchSampler)(hearing(SequentialSampler)(range(8)), 2, False)
    loader = prepared(DataLoader(hearing(TensorDataset)(torch.arange(8)), batch_sampler=batches))
    skip_first_batches(loader, 1).set_epoch(3)
    assert heard == [(BatchSampler, 3), (SequentialSampler, 3), (TensorDataset, 3)]
    assert loader.iteration == 3


class Scaled(DataLoader):
    """A subclass with its own iteration, constructor, length and attributes."""

    unit = "dB"

    def __init__(self, data, factor, workers=0):
        super().__init__(data, batch_size=2, collate_fn=self.collate, num_workers=workers)
        self.factor = factor

    @property
    def offset(self):
        return 1

    def collate(self, rows):
        return torch.tensor(rows)

    def __len__(self):
        return 5

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.factor + self.offset


class Doubled(Scaled):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


class Halves(Scaled):
    """Yields more batches than it reads."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from batch.split(1)


class Ahead(Scaled):
    """Reads further than it yields, and skips some batches."""

    def __iter__(self):
        batches = [batch for batch in super().__iter__() if batch[0] % 3]
        yield from batches


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Scaled, Doubled, Halves, Ahead])
def test_stateful_loader_keeps_subclass_and_resumes(kind, workers):
    def make():
        return prepare_data_loader(kind(list(range(20)), 10, workers), use_stateful_dataloader=True)

    want, loader = values(kind(list(range(20)), 10)), make()
    assert values(loader) == want
    assert isinstance(loader, kind) and len(loader) == 5
    assert (loader.unit, loader.offset, loader.factor) == ("dB", 1, 10)
    assert values(copy.copy(loader.base_dataloader)) == want
    got, state = [], None
    for stop in (2, 1, 99):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        for number, batch in enumerate(loader, 1):
            got.append(batch.tolist())
            if number == stop:
                state = loader.state_dict()
                break
    assert got == want


@needs_torchdata
def test_stateful_loader_refuses_subclass_with_its_own_iterator():
    class Replaced(DataLoader):
        def _get_iterator(self):
            return iter(())

    with pytest.raises(TypeError, match="cannot keep Replaced._get_iterator.*use_stateful_dataloader=False"):
        prepare_data_loader(Replaced(DATA), use_stateful_dataloader=True)


def test_a_subclass_that_keeps_its_state_is_not_replaced():
    class Keeps(DataLoader):
        read = start = 0

        def __iter__(self):
            self.read, self.start = self.start, 0
            for batch in itertools.islice(super().__iter__(), self.read, None):
                self.read += 1
                yield batch

        def state_dict(self):
            return {"read": self.read}

        def load_state_dict(self, state):
            self.start = state["read"]

    def make():
        return prepare_data_loader(Keeps(list(range(8)), 2))

    loader = make()
    next(iter(loader))
    state, again = loader.state_dict(), make()
    assert isinstance(loader, Keeps) and state["read"] == 1
    again.load_state_dict(state)
    assert values(again) == [[2, 3], [4, 5], [6, 7]] and values(again)[0] == [0, 1]


@needs_torchdata
def test_ready_made_batches_of_a_stream_stay_as_they_are():
    class Ready(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6).split(2))

    loader = prepare_data_loader(DataLoader(Ready(), batch_size=None), use_stateful_dataloader=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
