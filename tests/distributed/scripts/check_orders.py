"""Orders and datasets that differ between ranks: refused on all ranks, or a warning; loaders that not all ranks read.

accelerate launch --cpu --num_processes 2 check_orders.py
"""

import random
import warnings
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import torch
from expect import raised, warned
from harness import everywhere, fresh_accelerator, rank, world
from torch.utils.data import DataLoader, Sampler, random_split

from accelerate import DataLoaderConfiguration
from accelerate.data_loader import skip_first_batches
from accelerate.extensions.same_data import agreement
from accelerate.state import PartialState
from accelerate.utils import set_seed
from accelerate.utils.imports import is_datasets_available

USUAL = ("check_", "stored_") if is_datasets_available() else ("check_",)


class DrawnBy(Sampler):
    """An order that a function draws from generators of the process."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 32

    def __iter__(self):
        return iter(self.draw())


def shuffled(items):
    return random.sample(items, len(items))


def small_table(length):
    import datasets

    return datasets.Dataset.from_dict({"number": list(range(length))})


def drawn_loaders():
    """Loaders whose order or membership comes from generators of the process, by name."""
    numbers = range(32)
    orders = {
        "random": lambda: shuffled(numbers),
        "numpy": lambda: np.random.permutation(32).tolist(),
        "torch": lambda: torch.randperm(32).tolist(),
    }
    for name, draw in orders.items():
        yield name, DataLoader(numbers, 4, sampler=DrawnBy(draw))
    yield "batches", DataLoader(numbers, batch_sampler=DrawnBy(lambda: [shuffled(numbers)[:4] for _ in range(8)]))
    yield "workers", DataLoader(numbers, 4, sampler=DrawnBy(orders["torch"]), num_workers=1)
    yield "random_split", DataLoader(random_split(range(40), [32, 8])[0], 4, shuffle=True)
    yield "names", DataLoader(shuffled([str(number) for number in numbers]), 4)
    yield "length", DataLoader(range(32 + random.randrange(500)), 4)
    if not is_datasets_available():
        return
    table = small_table(32)
    yield "shuffle", DataLoader(table.shuffle(), 4)
    yield "train_test_split", DataLoader(table.train_test_split(test_size=8)["train"], 4)
    names = {"name": shuffled([str(number) for number in range(32)])}
    yield "table of names", DataLoader(type(table).from_dict(names), 4)
    yield "stream", DataLoader(table.to_iterable_dataset(num_shards=world()).shuffle(random.randrange(999)), 4)


def read(loader):
    return [batch.tolist() for batch in loader]


def read_in_turns(loader):
    """Let each rank read the epoch while the others wait."""
    for turn in range(world()):
        if turn == rank():
            yield from loader
        PartialState().wait_for_everyone()


def check_orders_that_differ_between_ranks_are_refused():
    for seeded_alike in (True, False):
        names = []
        accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
        set_seed(3, device_specific=not seeded_alike)
        for name, loader in drawn_loaders():
            set_seed(3, device_specific=not seeded_alike)
            prepared = accelerator.prepare(loader)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if seeded_alike or world() == 1:
                    assert list(prepared)
                else:
                    with raised(RuntimeError, "check_orders.py", "already_sharded=True"):
                        list(prepared)
            names.append(name)
        assert everywhere(names) == [names] * world()
    set_seed(0)


def stored_rows_that_differ_warn():
    from datasets.distributed import split_dataset_by_node

    table = small_table(8 * world())
    for options in ({}, {"already_sharded": True}):
        accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(**options))
        loader = accelerator.prepare(DataLoader(split_dataset_by_node(table, rank(), world()), 2))
        with warned(int(world() > 1 and not options), "the table of a Dataset holds different values"):
            list(loader)
            list(loader)


def check_orders_are_compared_without_a_collective():
    """Ranks may read a loader alone or one after the other, and begin an epoch in its middle."""
    accelerator = fresh_accelerator()
    loader = accelerator.prepare(DataLoader(range(8 * world()), 2))
    with patch.object(agreement, "PATIENCE_S", 0.0):
        if rank() == 0:
            list(loader)
            next(iter(loader))
        accelerator.wait_for_everyone()
        want = read(loader)
        assert read(skip_first_batches(loader, 1)) == want[1:]
        ordered = accelerator.prepare(DataLoader(range(8 * world()), 2, sampler=DrawnBy(lambda: range(8 * world()))))
        got = [batch.tolist() for batch in read_in_turns(ordered)]
        assert got == want and read(skip_first_batches(ordered, 1)) == want[1:]
        differing = accelerator.prepare(DataLoader(range(32), 2, sampler=DrawnBy(lambda: [rank()] * 32)))
        for turn in range(world()):
            if turn == rank():
                with raised(RuntimeError, "different orders") if turn else nullcontext():
                    list(differing)
            accelerator.wait_for_everyone()
