"""gather_for_metrics returns the dataset, each sample once and in order, however it is loaded."""

import itertools
import warnings

import torch
from harness import everywhere, fresh_accelerator, run
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from accelerate import DataLoaderConfiguration
from accelerate.utils import gather_object


class Rows(Dataset):
    """Rows that say which one they are, in the structure that `shape` names."""

    def __init__(self, length, shape="tensor"):
        self.length = length
        self.shape = shape

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        if self.shape == "nested":
            pair = torch.tensor([index, -index])
            return {"pair": pair, "more": (torch.tensor(float(index)), [pair.flip(0)])}
        return f"row {index}" if self.shape == "text" else torch.tensor(index)


class Stream(Rows, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(self.length))


class UnknownLength(IterableDataset):
    def __init__(self, length):
        self.rows = length

    def __iter__(self):
        return iter(torch.arange(self.rows))


def accelerator_with(**options):
    return fresh_accelerator(dataloader_config=DataLoaderConfiguration(**options))


def collected(accelerator, loader):
    """Return the numbers of the rows that an evaluation loop sees, in their order."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            if isinstance(batch, dict):
                batch["more"] = tuple(batch["more"])
            gathered = accelerator.gather_for_metrics(batch)
            if isinstance(gathered, dict):
                numbers = gathered["pair"][:, 0].tolist()
                assert gathered["pair"][:, 1].tolist() == [-number for number in numbers]
                assert isinstance(gathered["more"], tuple) and isinstance(gathered["more"][1], list)
                assert gathered["more"][0].tolist() == numbers
                assert gathered["more"][1][0][:, 1].tolist() == numbers
            elif isinstance(gathered, list):
                numbers = [int(text.removeprefix("row ")) for text in gathered]
            else:
                numbers = gathered.tolist()
            found += numbers
    return found


def kept(length, total_batch_size, drop_last):
    return list(range(length // total_batch_size * total_batch_size if drop_last else length))


def every_row_of_a_map_style_dataset():
    combinations = list(itertools.product((0, 1, 2, 5, 8, 11), (1, 2, 3), (False, True), (False, True), (False, True)))
    for length, size, drop_last, split, dispatch in combinations:
        accelerator = accelerator_with(split_batches=split, dispatch_batches=dispatch)
        world = accelerator.num_processes
        loader = DataLoader(Rows(length), batch_size=size * world if split else size, drop_last=drop_last)
        loader = accelerator.prepare(loader)
        for epoch in range(2):
            found = collected(accelerator, loader)
            expected = kept(length, size * world, drop_last)
            assert found == expected, (length, size, drop_last, split, dispatch, epoch, found)
    assert len(combinations) >= 60


def every_row_of_a_stream():
    for length, size, drop_last, dispatch in itertools.product(
        (0, 1, 2, 5, 8, 11), (1, 2, 3), (False, True), (False, True)
    ):
        for dataset in (Stream(length), UnknownLength(length)):
            accelerator = accelerator_with(dispatch_batches=dispatch)
            loader = accelerator.prepare(DataLoader(dataset, batch_size=size, drop_last=drop_last))
            found = collected(accelerator, loader)
            expected = kept(length, size * accelerator.num_processes, drop_last)
            assert found == expected, (length, size, drop_last, dispatch, type(dataset), found)


def every_row_in_any_structure():
    for shape, dispatch, length, size in itertools.product(
        ("nested", "text"), (False, True), (1, 5, 8, 11), (1, 2, 3)
    ):
        accelerator = accelerator_with(dispatch_batches=dispatch)
        loader = accelerator.prepare(DataLoader(Rows(length, shape), batch_size=size))
        assert collected(accelerator, loader) == list(range(length)), (shape, dispatch, length, size)


def objects_and_tensors_of_different_widths():
    accelerator = accelerator_with()
    for length in (1, 5, 8):
        loader = accelerator.prepare(DataLoader(Rows(length), batch_size=2))
        as_objects, padded, scalars = [], [], 0
        for batch in loader:
            answers = [{"row": number} for number in batch.tolist()]
            as_objects += accelerator.gather_for_metrics(answers, use_gather_object=True)
            # Each rank pads to its own longest row, as generation does.
            width = int(batch.max()) + 1
            wide = batch[:, None].expand(-1, width)
            wide = accelerator.pad_across_processes(wide, dim=1, pad_index=-1)
            padded += accelerator.gather_for_metrics(wide)[:, 0].tolist()
            tensors = [torch.full((n + 1,), n) for n in batch.tolist()]
            different = accelerator.gather_for_metrics(tensors, use_gather_object=True)
            assert [len(tensor) - 1 for tensor in different] == padded[-len(different) :]
            scalars += accelerator.gather(torch.tensor(1, device=accelerator.device)).sum().item()
        assert [answer["row"] for answer in as_objects] == list(range(length))
        assert padded == list(range(length))
        assert scalars == len(loader) * accelerator.num_processes


def custom_batches_and_workers():
    accelerator = accelerator_with()
    world = accelerator.num_processes
    for length, drop_last in itertools.product((1, 5, 8), (False, True)):
        batches = BatchSampler(SequentialSampler(range(length)), 2, drop_last)
        loader = accelerator.prepare(DataLoader(Rows(length), batch_sampler=batches))
        assert collected(accelerator, loader) == kept(length, 2 * world, drop_last)
    chosen = [9, 2, 4, 4, 7]  # a sampler decides what the dataset is
    loader = accelerator.prepare(DataLoader(Rows(10), batch_size=2, sampler=chosen))
    assert collected(accelerator, loader) == chosen
    loader = accelerator.prepare(DataLoader(Rows(11), batch_size=2, num_workers=1))
    assert collected(accelerator, loader) == list(range(11))
    single = accelerator.prepare(DataLoader(Rows(5), batch_size=None))
    found = [number for item in single for number in accelerator.gather_for_metrics(item.reshape(1)).tolist()]
    assert found == list(range(5))


def shuffled_rows_appear_once():
    for seedable, dispatch in itertools.product((False, True), (False, True)):
        accelerator = accelerator_with(use_seedable_sampler=seedable, dispatch_batches=dispatch, data_seed=4)
        loader = accelerator.prepare(DataLoader(Rows(23), batch_size=3, shuffle=True))
        orders = [collected(accelerator, loader) for _ in range(2)]
        for order in orders:
            assert sorted(order) == list(range(23)), order
        assert orders[0] != orders[1] and everywhere(orders) == [orders] * accelerator.num_processes


def rest_of_an_epoch():
    for dispatch, length in itertools.product((False, True), (9, 12)):
        accelerator = accelerator_with(dispatch_batches=dispatch)
        step = 2 * accelerator.num_processes
        loader = accelerator.prepare(DataLoader(Rows(length), batch_size=2))
        rest = accelerator.skip_first_batches(loader, 2)
        assert collected(accelerator, rest) == list(range(2 * step, length)), (dispatch, length)
        assert collected(accelerator, loader) == list(range(length))


def uneven_ranks_are_counted_by_hand():
    """Without even batches, ranks may stop at different steps, so what they saw is gathered after the loop."""
    for length, size in itertools.product((1, 5, 8, 11), (1, 2, 3)):
        accelerator = accelerator_with(even_batches=False)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        loader = accelerator.prepare(DataLoader(Rows(length), batch_size=size))
        mine = []
        with accelerator.join_uneven_inputs([model]):
            for batch in loader:
                accelerator.backward(model(batch[:, None].float()).sum())
                mine += batch.tolist()
        assert sorted(gather_object(mine)) == list(range(length)), (length, size)
    # Where the data divides evenly, nothing differs.
    accelerator = accelerator_with(even_batches=False)
    loader = accelerator.prepare(DataLoader(Rows(6 * accelerator.num_processes), batch_size=2))
    assert collected(accelerator, loader) == list(range(6 * accelerator.num_processes))


def outside_a_loop_everything_is_returned():
    accelerator = accelerator_with()
    rank, world = accelerator.process_index, accelerator.num_processes
    loader = accelerator.prepare(DataLoader(Rows(1), batch_size=2))
    assert collected(accelerator, loader) == [0]
    tensor = torch.tensor([rank, rank], device=accelerator.device)
    assert accelerator.gather_for_metrics(tensor).tolist() == sorted(2 * list(range(world)))


if __name__ == "__main__":
    run(
        every_row_of_a_map_style_dataset,
        every_row_of_a_stream,
        every_row_in_any_structure,
        objects_and_tensors_of_different_widths,
        custom_batches_and_workers,
        shuffled_rows_appear_once,
        rest_of_an_epoch,
        uneven_ranks_are_counted_by_hand,
        outside_a_loop_everything_is_returned,
    )
