"""Iterating over a prepared loader: the end, the active loader, the epochs."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.base.nested import leaves
from accelerate.data.adapter import DataLoaderStateMixin
from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.loader import DataLoaderShard, SkipDataLoader
from accelerate.state import GradientState
from loader_samples import Numbers, Stream, needs_torchdata, values


def test_epochs_count_up_and_reach_the_dataset():
    class Data(Numbers):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

    data = Data()
    loader = prepare_data_loader(DataLoader(data, 3))
    values(loader), values(loader)
    assert data.epochs == (0, 1) and loader.iteration == 2
    loader.set_epoch(7)
    assert loader.iteration == 7 and data.epochs[-1] == 7
    loader.iteration = 9
    values(loader)
    assert data.epochs[-1] == 9


class Curriculum(Numbers):
    """Samples that depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return 100 * self.epoch + index


class CurriculumStream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from (100 * self.epoch + number for number in range(4))


class ShuffledStream(IterableDataset):
    """Shuffles with a generator, which its shard seeds from the epoch."""

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        yield from torch.randperm(64, generator=self.generator).tolist()


@pytest.mark.parametrize("data", [Curriculum(4), CurriculumStream()], ids=["map", "stream"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dispatch_batches": False}, pytest.param({"use_stateful_dataloader": True}, marks=needs_torchdata)],
    ids=["dispatched streams", "no dispatch", "torchdata"],
)
@pytest.mark.filterwarnings("ignore")
def test_set_epoch_reaches_persistent_workers(data, options):
    loader = DataLoader(data, 2, num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(loader, put_on_device=True, **options)
    assert loader.dataset is data
    read = [values(loader), values(loader)]
    loader.set_epoch(7)
    next(iter(loader))  # a loop that is left early
    loader.set_epoch(9)
    read.append(values(loader))
    assert read == [[[100 * epoch, 100 * epoch + 1], [100 * epoch + 2, 100 * epoch + 3]] for epoch in (0, 1, 9)]


def test_persistent_workers_shuffle_a_sharded_stream_anew_in_each_epoch():
    def orders(**workers):
        loader = DataLoader(ShuffledStream(), 2, **workers)
        loader = prepare_data_loader(loader, num_processes=2, process_index=0, dispatch_batches=False)
        return [values(loader), values(loader)]

    first, second = orders(num_workers=1, persistent_workers=True)
    assert [first, second] == orders(num_workers=1) and first != second


def test_batches_go_to_the_device_and_those_that_are_there_pass_through():
    tensor = torch.arange(2)
    for batch in (
        tensor,
        {"x": tensor, "y": tensor},
        [tensor, tensor],
        {"x": {"y": tensor}, "text": "a", "more": [3]},
    ):
        loader = DataLoader([0], collate_fn=lambda _, batch=batch: batch)
        assert prepare_data_loader(loader).device is None
        [there] = prepare_data_loader(loader, put_on_device=True)
        assert there is batch or (there == batch and there["x"]["y"] is tensor)
        [moved] = prepare_data_loader(loader, device=torch.device("meta"), put_on_device=True)
        assert next(leaf for leaf in leaves(moved) if isinstance(leaf, torch.Tensor)).device.type == "meta"


@pytest.mark.parametrize(("drop_last", "remainder"), [(True, -1), (False, 1)])
def test_a_loader_of_ones_own_keeps_its_state_with_the_mixin(drop_last, remainder):
    class Own(DataLoaderStateMixin):
        total_dataset_length, total_batch_size, _drop_last, gradient_state = 5, 2, drop_last, GradientState()

    own = Own()
    own.begin()
    assert own.gradient_state.active_dataloader is own and own.remainder == remainder
    own.end()
    assert not own.gradient_state.in_dataloader


# -- leaving out the beginning of an epoch; test_truth_samplers.py has every small case ----------------------------------


def test_a_torch_loader_that_is_shortened_stays_one():
    data = Numbers()
    loader = skip_first_batches(DataLoader(data, 3), 6 / 3)
    assert type(loader) is DataLoader and len(loader) == 2
    assert values(loader) == values(loader) == [[6, 7, 8], [9]]
    assert set(data.loaded) == {6, 7, 8, 9}, "skipped samples are not loaded"


def test_streams_are_read_and_dropped():
    loader = skip_first_batches(DataLoader(Stream(), 3), 1)
    assert type(loader) is SkipDataLoader and values(loader) == [[3, 4, 5], [6, 7, 8], [9]]
    assert values(skip_first_batches(loader, 2)) == [[9]]
    twice = skip_first_batches(skip_first_batches(prepare_data_loader(DataLoader(Stream(), 3)), 1), 1)
    assert type(twice) is DataLoaderShard and values(twice) == [[6, 7, 8], [9]]
    parts = [
        prepare_data_loader(skip_first_batches(DataLoader(Stream(), 2), 1), "cpu", 2, rank, put_on_device=False)
        for rank in (0, 1)
    ]
    assert [values(part) for part in parts] == [[[4, 5], [8, 9]], [[6, 7], [0, 1]]], "each rank omits one of its own"


def test_what_cannot_be_left_out_is_refused():
    with pytest.raises(ValueError, match="num_batches is -1"):
        skip_first_batches(DataLoader(Numbers(), 3), -1)
    with pytest.raises(TypeError, match="dataloader is a list"):
        skip_first_batches([1, 2], 1)
    for data in (Numbers(), Stream()):
        with pytest.raises(ValueError, match="99.* but"):
            values(skip_first_batches(prepare_data_loader(DataLoader(data, 3)), 99))


class UnsizedBatches(torch.utils.data.Sampler):
    """Batches of two, from a sampler that does not tell their size."""

    def __len__(self):
        return 5

    def __iter__(self):
        return ([start, start + 1] for start in range(0, 10, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 8, "even_batches": False},
        {"batch_size": 8, "drop_last": True},
        {"batch_sampler": UnsizedBatches(), "even_batches": False},
        {"batch_sampler": UnsizedBatches()},
    ],
    ids=["another rank has one more", "incomplete round is dropped", "without a size", "without a size, full rounds"],
)
def test_metrics_keep_all_samples_of_a_last_round_that_is_full(options, caplog):
    caplog.set_level("INFO", logger="accelerate")
    accelerator, options = Accelerator(cpu=True), dict(options)
    parts = {"num_processes": 5 if len(options) == 1 else 2, "even_batches": options.pop("even_batches", True)}
    length = 100 if "batch_size" in options else 10
    loader = prepare_data_loader(DataLoader(Numbers(length), **options), process_index=1, **parts)
    for batch in loader:
        assert accelerator.gather_for_metrics(batch).tolist() == batch.tolist()
    assert loader.end_of_dataloader and "has no length" not in caplog.text


@pytest.mark.parametrize("kind", [DataLoaderShard, SkipDataLoader])
def test_of_an_empty_loader_no_batch_is_the_last(kind):
    loader = kind([], batch_size=2)
    assert list(loader) == [] and not loader.end_of_dataloader
    loader = kind(range(3), batch_size=2)
    assert len(list(loader)) == 2 and loader.end_of_dataloader


def test_metrics_of_an_uneven_last_round_keep_the_real_samples():
    loaders = [
        prepare_data_loader(DataLoader(Numbers(28), 8), num_processes=2, process_index=rank, even_batches=False)
        for rank in (0, 1)
    ]
    assert [[loader.remainder for _ in loader] for loader in loaders] == [[12, 12], [12, 12]]
