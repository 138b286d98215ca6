"""Data sets for tests of loaders, and the broadcasts of a dispatching process within this one."""

import pickle
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from accelerate.data.build import prepare_data_loader
from accelerate.extensions.dispatch.scatter import Scatter
from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

CPU = torch.device("cpu")
TWO = {"num_processes": 2, "process_index": 1}
needs_torchdata = pytest.mark.skipif(
    not is_torchdata_stateful_dataloader_available(), reason="needs torchdata's StatefulDataLoader"
)


class Numbers(Dataset):
    """The numbers up to a length; `loaded` are those that were requested."""

    def __init__(self, length=10):
        self.length, self.loaded = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class Stream(IterableDataset):
    def __init__(self, length=10):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class SizedStream(Stream):
    def __len__(self):
        return self.length


def values(loader):
    return [batch.tolist() for batch in loader]


class Line:
    """A communicator that keeps what the main process broadcasts, or gives a receiver what was kept."""

    group = None

    def __init__(self, sent, rank):
        self.sent, self.rank, self.sends = deque(sent) if rank else sent, rank, rank == 0

    def broadcast_object_list(self, values, source):
        if self.sends:
            self.sent.append(pickle.dumps(values))
        else:
            values[:] = pickle.loads(self.sent.popleft())
        return values


def dispatched(loader, sent, world, rank, **options):
    """A dispatching loader of a rank; rank 0 has to be run to its end before another one begins."""
    options |= {"num_processes": world, "process_index": rank, "dispatch_batches": True}
    loader = prepare_data_loader(loader, put_on_device=True, device=CPU, **options)
    loader.state = SimpleNamespace(num_processes=world, process_index=rank, device=CPU)
    loader._connection = Scatter(Line(sent, rank), None, None, CPU, range(world))
    return loader
