"""Data sets for tests of loaders."""

import pytest
from torch.utils.data import Dataset, IterableDataset

from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

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
