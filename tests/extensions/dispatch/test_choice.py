"""Which loaders are dispatched, and what `prepare_data_loader` refuses and warns of."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate import Accelerator, data_loader
from accelerate.data.build import prepare_data_loader
from accelerate.data.iterable import is_datapipe
from accelerate.data_loader import DataLoaderDispatcher
from loader_samples import TWO, Numbers, Stream, values


def test_a_stream_is_dispatched_where_batches_are_put_on_a_device():
    assert type(prepare_data_loader(DataLoader(Stream(8), 2), put_on_device=True)) is DataLoaderDispatcher
    for options in ({"put_on_device": False}, {"put_on_device": True, "dispatch_batches": False}):
        assert type(prepare_data_loader(DataLoader(Stream(8), 2), **options)) is data_loader.DataLoaderShard


def test_a_dispatched_datapipe_does_not_wait_for_processes_that_do_not_read():
    pipe = IterableWrapper(range(8))
    prepared = prepare_data_loader(DataLoader(pipe, 2), put_on_device=True)
    assert type(prepared) is DataLoaderDispatcher and not is_datapipe(prepared.base_dataloader.dataset)
    assert values(prepared) == values(DataLoader(Stream(8), 2)) and len(prepared) == 4


def test_batches_that_no_device_gets_are_refused():
    with pytest.raises(ValueError, match="put_on_device=True"):
        prepare_data_loader(DataLoader(Numbers(8), 3), dispatch_batches=True)


def loader_of_a_rank():
    data = Numbers(8)
    return DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=False))


@pytest.mark.parametrize(
    "loader, options",
    [
        (loader_of_a_rank(), {"num_processes": 2, "process_index": 0}),
        (DataLoader(Stream(8), 4), {"shard_iterable_dataset": False, **TWO}),
    ],
    ids=["sampler", "stream"],
)
def test_dispatching_what_is_divided_warns_that_parts_are_not_read(loader, options):
    with pytest.warns(
        UserWarning, match="data is divided already: the parts of the other processes will not be read"
    ) as c:
        prepare_data_loader(loader, put_on_device=True, dispatch_batches=True, **options)
    assert len(c) == 1


def test_a_divided_stream_is_dispatched_with_a_warning():
    stream = Stream(8)
    stream._distributed = SimpleNamespace(rank=1, world_size=2)
    with pytest.warns(UserWarning, match="will not be read"):
        prepare_data_loader(DataLoader(stream, 2), put_on_device=True, dispatch_batches=True, **TWO)


def test_a_slice_function_without_dispatching_is_warned_about_on_the_users_line():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call = lambda: Accelerator(cpu=True).prepare_data_loader(DataLoader([1]), slice_fn_for_dispatch=max)  # noqa: E731
        call()
    (warning,) = found
    assert "slice_fn_for_dispatch has no effect" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)


UNUSED = """
import sys
from torch.utils.data import DataLoader
from accelerate import Accelerator
list(Accelerator(cpu=True).prepare(DataLoader([1, 2])))
print([name for name in sys.modules if name.startswith("accelerate.extensions.dispatch.")])
"""


@pytest.mark.cold
def test_a_run_that_dispatches_nothing_does_not_import_the_loader():
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
