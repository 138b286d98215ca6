"""Loaders of every kind look like the loader they were made of, and yield the same samples."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.loader import PreparedLoader
from loader_samples import Stream, needs_torchdata, values

pytestmark = pytest.mark.filterwarnings("ignore")


class Doubling(DataLoader):
    """A loader with a separate iteration, and something to remember."""

    note = "kept"

    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch


class Collating:
    """A collate function with settings."""

    def __init__(self, offset):
        self.offset = offset

    def __call__(self, samples):
        return torch.tensor(samples) + self.offset


def dataset(stream):
    return Stream(11) if stream else list(range(11))


def expected(world):
    """The part of the last of so many processes."""
    return {1: [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]], 2: [[4, 5, 6, 7], [1, 2, 3, 4]]}[world]


@pytest.mark.parametrize("stateful", [False, pytest.param(True, marks=needs_torchdata)])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_settings_survive(world, stream, workers, stateful):
    collate = Collating(100)
    more = {"prefetch_factor": 3, "timeout": 60} if workers and not stateful else {}
    whole = DataLoader(dataset(stream), 4, collate_fn=collate, num_workers=workers, **more)
    loader = prepare_data_loader(
        whole, num_processes=world, process_index=world - 1, use_stateful_dataloader=stateful, dispatch_batches=False
    )
    want = [[100 + number for number in batch] for batch in expected(world)]
    assert isinstance(loader, DataLoader) and type(loader).__mro__[1] is PreparedLoader
    assert loader.__class__ is type(loader.base_dataloader)
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        assert isinstance(loader, StatefulDataLoader)
    assert loader.collate_fn is collate and loader.num_workers == workers
    assert all(getattr(loader, name) == value for name, value in more.items())
    # torchdata's loader has none next to a batch sampler, as torch's.
    assert loader.batch_size == (None if stateful and not stream else 4) and loader.total_batch_size == 4 * world
    assert values(loader) == values(loader) == want
    # Each loop starts the workers again.
    for skip in (1,) if workers else range(len(want) + 1):
        view = skip_first_batches(loader, skip)
        assert isinstance(view, type(loader.base_dataloader)) and view.collate_fn is collate
        assert values(view) == want[skip:]
    assert values(copy.copy(loader)) == want
    if not stateful:
        twin = copy.deepcopy(loader)
        assert values(twin) == want and not twin.gradient_state.in_dataloader
    if not stateful:  # torchdata's iterator stays in its loader, and cannot be pickled
        assert values(pickle.loads(pickle.dumps(loader))) == want


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_classes_of_ones_own_keep_their_iteration(world, stream, workers):
    whole = Doubling(dataset(stream), 4, num_workers=workers)
    loader = prepare_data_loader(whole, num_processes=world, process_index=world - 1, dispatch_batches=False)
    want = [[2 * number for number in batch] for batch in expected(world)]
    assert isinstance(loader, Doubling) and loader.note == "kept"
    for _ in range(2):
        assert [(batch.tolist(), loader.end_of_dataloader) for batch in loader] == [
            (batch, number == len(want)) for number, batch in enumerate(want, 1)
        ]
    assert values(skip_first_batches(loader, 1)) == want[1:]
    # The caller's loader is as it was.
    assert values(whole) == [[2 * number for number in batch] for batch in expected(1)]


@needs_torchdata
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_every_batch_continues_after_it(workers, stream):
    def build():
        loader = DataLoader(dataset(stream), 4, num_workers=workers)
        options = {"use_stateful_dataloader": True, "dispatch_batches": False}
        return prepare_data_loader(loader, num_processes=2, process_index=1, **options)

    loader = build()
    for number, _ in enumerate(loader, 1):
        again = build()
        again.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
        rest = [(batch.tolist(), again.batch_counts, again.end_of_dataloader) for batch in again]
        # After the last batch comes the next epoch.
        assert rest == [([4, 5, 6, 7], None, False), ([1, 2, 3, 4], (3, 0), True)][number % 2 :]
        assert values(again) == expected(2)
