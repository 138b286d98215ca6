"""The loader that reads on one process: several of them in this process, with a line in between."""

import pickle
import threading
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data.build import skip_first_batches
from accelerate.state import GradientState
from loader_samples import Stream, dispatched, values

UNSENDABLE = threading.Lock()


class Rows(IterableDataset):
    def __init__(self, length, error_at=None):
        self.length, self.error_at = length, error_at

    def __iter__(self):
        for index in range(self.length):
            if index == self.error_at:
                raise OSError(f"row {index}")
            yield {"x": torch.tensor([index]), "name": f"row {index}"}


def test_batches_of_varying_size_lose_nothing():
    sizes = [2, 1, 2, 3, 1]
    numbers = iter(range(sum(sizes)))
    batches = [list(islice(numbers, size)) for size in sizes]
    data = [{"x": torch.tensor([n])} for n in range(sum(sizes))]
    sent = []
    # The main process first, then the other one with what it sent.
    for rank, parts in enumerate(([[0, 1], [3, 4, 5], [8]], [[2], [6, 7], [0]])):
        loader = dispatched(DataLoader(data, batch_sampler=batches), sent, 2, rank)
        steps = [(batch["x"].view(-1).tolist(), loader.end_of_dataloader, loader.batch_counts) for batch in loader]
        assert [batch for batch, *_ in steps] == parts and steps[-1][1:] == (True, (1, 0)) and loader.remainder == 1
        assert not GradientState().in_dataloader


def test_an_error_while_reading_stops_all_processes():
    sent = []
    with pytest.raises(OSError, match="row 5"):
        list(dispatched(DataLoader(Rows(8, error_at=5), 2), sent, 2, 0))
    with pytest.raises(RuntimeError, match="OSError: row 5"):
        list(dispatched(DataLoader(Rows(8), 2), sent, 2, 1))
    assert not GradientState().in_dataloader


@pytest.mark.parametrize("collate", [lambda rows: torch.eye(2).to_sparse(), lambda rows: (UNSENDABLE, torch.zeros(2))])
def test_what_cannot_be_sent_stops_all_processes(collate):
    sent = []
    with pytest.raises(Exception, match=r"(?i)sparse|layout|contiguous|pickle"):
        list(dispatched(DataLoader(Rows(4), 2, collate_fn=collate), sent, 2, 0))
    with pytest.raises(RuntimeError, match="could not read its next batch"):
        list(dispatched(DataLoader(Rows(4), 2), sent, 2, 1))


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda rows: {"n": len(rows)}, "cannot be divided among processes"),
        # Each rank would get the first batch's, or the wrong part of them.
        (
            lambda rows: {"x": torch.zeros(2), "name": rows[0]["name"]},
            "'row 0' is the same for all samples .* has 'row 2'",
        ),
        (
            lambda rows: {"x": torch.zeros(2), "words": [[row["name"]] for row in rows]},
            "of 2 samples has 1 values in .'row 0'.",
        ),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(collate, message):
    loader = dispatched(DataLoader(Rows(4), 2, collate_fn=collate), [], 2, 0)
    with pytest.raises(ValueError, match=message):
        list(loader)


def test_arrays_are_divided_as_tensors_are_and_what_all_batches_share_goes_to_all_ranks():
    def collate(rows):
        return {"x": np.concatenate([row["x"] for row in rows]), "kind": "rows", "n": np.array(2)}

    sent = []
    for rank, wanted in enumerate(([[0, 1], [4]], [[2, 3], [0]])):
        found = list(dispatched(DataLoader(Rows(5), 2, collate_fn=collate), sent, 2, rank))
        assert [batch["x"].tolist() for batch in found] == wanted
        assert all(
            isinstance(batch["x"], np.ndarray) and (batch["kind"], batch["n"]) == ("rows", 2) for batch in found
        )


@pytest.mark.parametrize("source", [lambda length: list(range(length)), Stream])
def test_the_rest_of_an_epoch_ends_with_the_same_duplicates(source):
    """What a run trains on after it was resumed includes the duplicates."""

    def batches(skip):
        sent: list = []
        loaders = (dispatched(DataLoader(source(11), batch_size=2), sent, 4, rank) for rank in range(4))
        return [values(skip_first_batches(loader, skip)) for loader in loaders]

    assert batches(1) == [of_rank[1:] for of_rank in batches(0)]


def test_nothing_of_the_connection_is_pickled():
    loader = dispatched(DataLoader([1, 2], 2), [], 2, 0)
    loader.state = None
    assert "_connection" not in vars(pickle.loads(pickle.dumps(loader)))
