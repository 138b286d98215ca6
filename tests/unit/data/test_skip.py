"""Leaving out the beginning of an epoch."""

import pytest
from torch.utils.data import DataLoader

from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.loader import DataLoaderShard, SkipDataLoader
from accelerate.data.samplers import SkipBatchSampler
from loader_samples import Numbers, SizedStream, Stream, values


def test_a_torch_loader_stays_one():
    data = Numbers()
    loader = skip_first_batches(DataLoader(data, 3), 2)
    assert type(loader) is DataLoader and len(loader) == 2
    assert values(loader) == values(loader) == [[6, 7, 8], [9]]
    assert set(data.loaded) == {6, 7, 8, 9}, "skipped samples are not loaded"


@pytest.mark.parametrize("options", [{}, {"num_processes": 2, "process_index": 1}, {"split_batches": True}])
@pytest.mark.parametrize("data", [Numbers(), SizedStream()], ids=["map", "stream"])
def test_a_prepared_loader_stays_one(data, options):
    loader = prepare_data_loader(DataLoader(data, 2), **options)
    want = values(loader)
    for count in (0, 1, 2, len(want)):
        view = skip_first_batches(loader, count)
        assert type(view) is DataLoaderShard
        assert values(view) == want[count:] and len(view) == max(0, len(want) - count)
    twice = skip_first_batches(skip_first_batches(loader, 1), 1)
    assert values(twice) == want[2:]
    with pytest.raises(ValueError, match="99.* but"):
        values(skip_first_batches(loader, 99))


def test_streams_are_read_and_dropped():
    loader = skip_first_batches(DataLoader(Stream(), 3), 1)
    assert type(loader) is SkipDataLoader and values(loader) == [[3, 4, 5], [6, 7, 8], [9]]
    assert values(skip_first_batches(loader, 2)) == [[9]]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="num_batches is -1"):
        skip_first_batches(DataLoader(Numbers(), 3), -1)
    with pytest.raises(TypeError, match="dataloader is a list"):
        skip_first_batches([1, 2], 1)


def test_a_count_that_was_divided_is_rounded_up():
    assert values(skip_first_batches(DataLoader(Numbers(), 2), 6 / 2)) == [[6, 7], [8, 9]]
    assert list(SkipBatchSampler([[0], [1], [2]], 1.5)) == [[2]]
