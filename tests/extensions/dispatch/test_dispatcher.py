"""The loader that reads on one process: several of them in this process, with a line in between."""

import pickle
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data.build import skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import GradientState
from cases import cases
from dispatch_samples import dispatched
from loader_samples import Stream, values

UNSENDABLE = threading.Lock()


class Rows(IterableDataset):
    def __init__(self, length, error_at=None):
        self.length, self.error_at = length, error_at

    def __iter__(self):
        for index in range(self.length):
            if index == self.error_at:
                raise OSError(f"row {index}")
            yield {"x": torch.tensor([index]), "name": f"row {index}"}


def test_an_error_while_reading_stops_all_processes():
    sent = []
    with pytest.raises(OSError, match="row 5"):
        list(dispatched(DataLoader(Rows(8, error_at=5), 2), sent, 2, 0))
    with pytest.raises(RuntimeError, match="OSError: row 5"):
        list(dispatched(DataLoader(Rows(8), 2), sent, 2, 1))
    assert not GradientState().in_dataloader


def test_what_cannot_be_sent_stops_all_processes():
    sent = []
    with pytest.raises(Exception, match=r"(?i)pickle"):
        list(dispatched(DataLoader(Rows(4), 2, collate_fn=lambda rows: (UNSENDABLE, torch.zeros(2))), sent, 2, 0))
    with pytest.raises(RuntimeError, match="could not read its next batch"):
        list(dispatched(DataLoader(Rows(4), 2), sent, 2, 1))


def patches(rows):
    """A batch of a vision-language model, with values of every other kind whose rows are no samples."""
    numbers = [row["x"].item() for row in rows]
    images = [torch.full((2 + number % 3, 3), float(number)) for number in numbers]
    layouts = torch.jagged, torch.strided
    return {
        "pixel_values": torch.cat(images),
        "grid": torch.tensor([[1, len(image), 1] for image in images]),
        "mask": torch.eye(numbers[0] + 2),
        "cu_seqlens": torch.tensor([0, *numbers]),
        "images": images,
        "labels": [{"boxes": image} for image in images],
        "name": rows[0]["name"],
        "sparse": torch.diag(torch.tensor(numbers)).to_sparse(),
        "nested": [torch.nested.nested_tensor([-image for image in images], layout=layout) for layout in layouts],
    }


def same(value, other):
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, torch.Tensor) and value.is_nested:
        return value.layout == other.layout and same(list(value.unbind()), list(other.unbind()))
    if isinstance(value, torch.Tensor):
        return value.layout == other.layout and torch.equal(value.to_dense(), other.to_dense())
    if isinstance(value, list):
        return len(value) == len(other) and all(map(same, value, other))
    return value == other


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_gets_the_batch_that_was_read_for_it(workers):
    rows, sent = list(Rows(8)), []
    for rank in range(2):
        loader = DataLoader(Rows(8), 2, collate_fn=patches, num_workers=workers)
        found = list(dispatched(loader, sent, 2, rank))
        assert same(found, [patches(rows[start : start + 2]) for start in (2 * rank, 2 * rank + 4)])


@cases(
    "rows, batch_size, options, message",
    (7, 2, {}, r"pixel_values'\] has 7 rows, and the batch has 2 samples.*drop_last=True in the DataLoader"),
    (8, 4, {"split_batches": True}, r"pixel_values'\] has 11 rows.*split_batches=False and drop_last=True"),
)
def test_rows_that_are_no_samples_are_refused_on_all_ranks_where_they_would_be_divided(
    rows, batch_size, options, message
):
    sent = []
    for rank, error in enumerate((ValueError, RuntimeError)):
        with pytest.raises(error, match=message):
            list(dispatched(DataLoader(Rows(rows), batch_size, collate_fn=patches), sent, 2, rank, **options))
    sent = []
    for rank in range(2):  # what the message recommends
        loader = dispatched(DataLoader(Rows(7), 2, collate_fn=patches, drop_last=True), sent, 2, rank)
        assert [batch["name"] for batch in loader] == [f"row {2 * rank}"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_slice_function_gets_all_rows_and_counts_samples(world):
    def patches_of(batch, part, process_index, num_processes):
        ends = [0, *batch["grid"][:, 1].cumsum(0).tolist()]
        return batch["pixel_values"][ends[part.start] : ends[part.stop]]

    def collate(rows):
        return {key: value for key, value in patches(rows).items() if key in ("pixel_values", "grid")}

    rows, sent = list(Rows(8)), []
    for rank in range(world):
        loader = dispatched(
            DataLoader(Rows(8), 2, collate_fn=collate), sent, world, rank, slice_fn_for_dispatch=patches_of
        )
        loader._connection.places, loader._connection.parts = None, 1
        starts = range(2 * rank, 8, 2 * world)
        assert same(list(loader), [patches(rows[start : start + 2])["pixel_values"] for start in starts])


def test_ready_made_batches_are_handed_out_and_refused_where_their_size_is_uncertain():
    batches = [patches(list(Rows(stop))[stop - 2 :]) for stop in (2, 4, 6)]
    sent = []
    for rank in range(2):
        found = dispatched(DataLoader(batches[:2], batch_size=None), sent, 2, rank)
        assert same(list(found), [batches[rank]]) and found.remainder == 0
    with pytest.raises(ValueError, match=r"uncertain, .*'pixel_values'\] has 7, .*dispatch_batches=False"):
        list(dispatched(DataLoader(batches, batch_size=None), [], 2, 0))


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


def test_of_an_empty_loader_no_batch_is_the_last():
    loader = DataLoaderDispatcher([], batch_size=2)
    assert list(loader) == [] and not loader.end_of_dataloader
