"""accelerate.data_loader: samplers, shards, prepared loaders, skipping."""

import torch
from torch.utils import data

from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import TorchDynamoPlugin
from interop.differential.core import BOTH, attempt, probe

PUBLIC = [
    "batch_size", "drop_last", "num_workers", "pin_memory", "timeout", "iteration", "device", "rng_types",
    "skip_batches",
]  # fmt: skip
PUBLIC += [
    "end_of_dataloader", "remainder", "total_batch_size", "total_dataset_length", "prefetch_factor",
    "persistent_workers",
]  # fmt: skip


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {k: plain(v) for k, v in batch.items()}
    return type(batch)(map(plain, batch)) if isinstance(batch, (list, tuple)) else batch


def walk(loader):
    """Return each batch, and what the loader and the state say while it is looked at."""
    state = GradientState()
    return [
        (plain(b), loader.end_of_dataloader, loader.remainder, state.end_of_dataloader, state.in_dataloader)
        for b in loader
    ]


def shown(loader):
    yield "class", type(loader).__name__
    yield "length", attempt(len, loader)
    yield "first", attempt(walk, loader)
    yield "second", attempt(walk, loader)
    for name in PUBLIC:
        yield name, attempt(getattr, loader, name)


def started():
    AcceleratorState(cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)


class Stream(data.IterableDataset):
    def __init__(self, length, sized=False):
        self.length, self.epoch = length, 0
        if sized:
            self.__class__ = SizedStream

    def __iter__(self):
        return iter(range(100 * self.epoch, 100 * self.epoch + self.length))

    def set_epoch(self, epoch):
        self.epoch = epoch


class SizedStream(Stream):
    def __len__(self):
        return self.length


class Pairs(data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index)), "name": f"n{index}", "deep": [index, (index, index + 1)]}


def generator(seed=4):
    return torch.Generator().manual_seed(seed)


SOURCES = {
    "plain": lambda: data.DataLoader(range(7), 2), "shuffled": lambda: data.DataLoader(range(7), 2, shuffle=True),
    "shuffled generator": lambda: data.DataLoader(range(7), 2, shuffle=True, generator=generator()),
    "no batches": lambda: data.DataLoader(range(3), batch_size=None),
    "subset": lambda: data.DataLoader(range(7), 2, sampler=data.SubsetRandomSampler([1, 3, 5], generator=generator())),
    "weighted": lambda: data.DataLoader(range(7), 2, sampler=data.WeightedRandomSampler([1.0] * 7, 5, generator=generator())),
    "seedable": lambda: data.DataLoader(range(7), 2, sampler=SeedableRandomSampler(range(7), generator=generator())),
    "batch sampler": lambda: data.DataLoader(range(7), batch_sampler=data.BatchSampler(data.SequentialSampler(range(7)), 3, True)),
    "own batches": lambda: data.DataLoader(range(7), batch_sampler=[[0, 1], [5, 6]]),
    "collate": lambda: data.DataLoader(range(7), 2, collate_fn=list), "pairs": lambda: data.DataLoader(Pairs(), 3),
    "tensors": lambda: data.DataLoader(data.TensorDataset(torch.arange(10).reshape(5, 2)), 2, drop_last=True),
    "stream": lambda: data.DataLoader(Stream(5), 2), "sized stream": lambda: data.DataLoader(Stream(5, True), 2),
    "stream no batches": lambda: data.DataLoader(Stream(3), batch_size=None), "none": lambda: None, "list": lambda: [1, 2],
    "dataset": lambda: Pairs(),
}  # fmt: skip
DISPATCHED = ["plain", "shuffled", "tensors", "stream", "sized stream"]


@probe(
    "data_loader:prepare_data_loader", "data_loader:DataLoaderShard", "data_loader:DataLoaderDispatcher",
    source=SOURCES, dispatch=[None, True, False], split=[False, True], stateful=[False, True],
)  # fmt: skip
def kinds(source, dispatch, split, stateful):
    started()
    more = {
        "dispatch_batches": dispatch, "use_stateful_dataloader": stateful, "put_on_device": bool(dispatch),
        "device": "cpu",
    }  # fmt: skip
    made = attempt(prepare_data_loader, source, split_batches=split, **more)
    if isinstance(made, Exception):
        yield "refused", made
        return
    yield from shown(made)


@probe("data_loader:prepare_data_loader", processes=2, source=SOURCES, split=[False, True], stateful=[False, True])
def kinds_apart(source, split, stateful):
    """Two processes that read for themselves."""
    return kinds(source, False, split, stateful)


@probe("data_loader:prepare_data_loader", processes=2, source=DISPATCHED, split=[False, True], stateful=[False, True])
def kinds_dispatched(source, split, stateful):
    """Data that one of two processes can send to the other; the rest would leave the other one waiting."""
    return kinds(SOURCES[source](), True, split, stateful)


@probe(
    "data_loader:prepare_data_loader", "data_loader:DataLoaderDispatcher", processes=BOTH, length=[1, 2, 5, 8],
    batch=[1, 2, 4], drop=[False, True], split=[False, True], style=["map", "stream"],
)  # fmt: skip
def dispatched(length, batch, drop, split, style):
    started()
    if split and batch % PartialState().num_processes:
        return  # refused, as `prepared` compares
    source = data.DataLoader(range(length) if style == "map" else Stream(length), batch, drop_last=drop)
    made = prepare_data_loader(source, split_batches=split, dispatch_batches=True, put_on_device=True, device="cpu")
    yield "batches", attempt(lambda: [plain(b) for b in made])
    yield "length", attempt(len, made)
    yield "seen", attempt(lambda: [(end, left) for _, end, left, *_ in walk(made)])
    yield "totals", attempt(lambda: (made.total_batch_size, made.total_dataset_length))
