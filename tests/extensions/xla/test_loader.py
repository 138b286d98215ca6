"""torch_xla's loader reads several batches ahead in a thread: what a loader says is about the batch handed out."""

import queue
import sys
import threading
import types

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.config.enums import DistributedType
from accelerate.data import resume
from accelerate.data.build import prepare_data_loader
from accelerate.extensions.xla import loader
from accelerate.process import PartialState
from accelerate.state import GradientState


class MpDeviceLoader:
    """A stand-in that has read the whole epoch, in a thread, before it hands out the first batch."""

    def __init__(self, loader, device):
        self._loader, self._device = loader, device

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        batches: queue.Queue = queue.Queue()

        def read():
            for batch in self._loader:
                batches.put(batch)
            batches.put(None)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join()
        while (batch := batches.get()) is not None:
            yield batch


@pytest.fixture
def prepare(monkeypatch):
    state = PartialState(cpu=True)  # before there is a torch_xla to be found
    module = types.ModuleType("torch_xla.distributed.parallel_loader")
    module.MpDeviceLoader = MpDeviceLoader
    for name in ("torch_xla", "torch_xla.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(state.__dict__, "distributed_type", DistributedType.XLA)
    loader.loader_class.cache_clear()
    yield lambda length, shard=0: prepare_data_loader(
        DataLoader(list(range(length)), 2),
        device=torch.device("cpu"),
        put_on_device=True,
        num_processes=2,
        process_index=shard,
    )
    loader.loader_class.cache_clear()


def test_the_end_belongs_to_the_batch_that_is_handed_out(prepare):
    loader, state = prepare(10), GradientState()
    for _ in range(2):
        seen, places = [], []
        for batch in loader:
            seen.append((batch.tolist(), state.end_of_dataloader))
            position = resume.capture(loader)
            places.append((position["epoch"], position["batches"], position["running"]))
        assert seen == [([0, 1], False), ([4, 5], False), ([8, 9], True)]
        epoch = loader.iteration
        assert places == [(epoch - 1, 1, True), (epoch - 1, 2, True), (epoch, 0, False)]
        assert loader.remainder == 2 and not state.in_dataloader
        position = resume.capture(loader)
        assert (position["epoch"], position["batches"]) == (epoch, 0)
    assert loader.iteration == 2
