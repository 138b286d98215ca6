"""Streams whose code keeps the part of one process."""

import warnings

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data.build import prepare_data_loader
from accelerate.extensions.same_data.agreement import SameData
from loader_samples import TWO, Stream


class Holder(IterableDataset):
    """A stream around another one."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(())


class Run:
    """In place of an Accelerator."""


class SplitsWhenRead(IterableDataset):
    def __iter__(self):
        from datasets.distributed import split_dataset_by_node

        yield from split_dataset_by_node(None, 0, 2)


@pytest.fixture
def register():
    """What the Accelerator of two processes does with a loader that it has prepared."""
    run = Run()
    extension = SameData(run)

    def register(stream, **options):
        extension.registered("loader", prepare_data_loader(DataLoader(stream, 2), **TWO, **options), False)

    return register


@pytest.mark.parametrize("dispatched", [True, False])
def test_stream_that_splits_when_it_is_read_warns(register, dispatched):
    options = {"dispatch_batches": dispatched, "put_on_device": dispatched}
    for stream in (SplitsWhenRead(), Holder(SplitsWhenRead())):
        with pytest.warns(UserWarning, match="SplitsWhenRead|Holder.*shard_iterable_dataset=False"):
            register(stream, **options)


def test_other_streams_and_those_that_are_said_to_be_divided_do_not_warn(register):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register(Holder(Stream()))
        register(SplitsWhenRead(), shard_iterable_dataset=False)
