"""Who reads what: the decisions of `prepare_data_loader`."""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, get_worker_info

from accelerate.config.enums import RNGType
from accelerate.data import build, reading
from accelerate.data.build import prepare_data_loader
from accelerate.data.layout import ShardLayout
from accelerate.data.loader import DataLoaderShard
from accelerate.data.workers import SeededDataset
from loader_samples import TWO, Numbers, Stream, values


class Pieces(Stream):
    """A stream like those of `datasets`: stored in pieces, able to give some of them."""

    num_shards = 2

    def __init__(self, pieces=((0, 1), (2, 3))):
        self.pieces = pieces

    def __iter__(self):
        for piece in self.pieces:
            yield from piece

    def shard(self, num_shards, index):
        return Pieces(self.pieces[index::num_shards])


def test_streams_that_can_divide_themselves_do(caplog):
    with caplog.at_level(logging.INFO):
        prepared = prepare_data_loader(DataLoader(Pieces(), 2), **TWO)
    assert values(prepared) == [[2, 3]] and "read: by pieces" in caplog.text
    assert type(prepared._reading) is reading.ByPieces and prepared._reading.ends_by_vote
    with caplog.at_level(logging.INFO):
        prepared = prepare_data_loader(DataLoader(Pieces(), 2), num_processes=3, process_index=1)
    assert type(prepared._reading) is reading.ReadsEverything and not prepared._reading.ends_by_vote
    assert "reads everything, keeps its part" in caplog.text


def test_a_stream_divided_by_its_user_is_not_divided_again():
    prepared = prepare_data_loader(DataLoader(Stream(8), 4), put_on_device=True, shard_iterable_dataset=False, **TWO)
    assert type(prepared) is DataLoaderShard and values(prepared) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert type(prepared._reading) is reading.AlreadySplit
    halved = prepare_data_loader(DataLoader(Stream(8), 4), split_batches=True, shard_iterable_dataset=False, **TWO)
    assert values(halved) == [[0, 1], [2, 3], [4, 5], [6, 7]] and halved.batch_size == 2
    map_style = prepare_data_loader(DataLoader(Numbers(8), 2), shard_iterable_dataset=False, **TWO)
    assert values(map_style) == [[2, 3], [6, 7]], "data with indices is divided all the same"


@pytest.mark.parametrize("options", [{}, TWO])
def test_worker_processes_of_map_style_data_are_seeded(options):
    data = Numbers(8)
    loader = DataLoader(data, 2, num_workers=1)
    prepared = prepare_data_loader(loader, **options)
    assert type(prepared.base_dataloader.dataset) is SeededDataset and loader.dataset is data
    assert prepared.dataset is data and len(prepared) == (2 if options else 4) and prepared.total_dataset_length == 8
    for other in (DataLoader(data, 2), DataLoader(Stream(8), 2, num_workers=1)):
        assert type(prepare_data_loader(other, **options).base_dataloader.dataset) is not SeededDataset


class Opened(Numbers):
    """Numbers behind something that every worker opens for itself."""

    def __getitem__(self, index):
        return self.opened + index


def test_what_a_worker_assigns_to_its_dataset_the_dataset_has():
    def open_it(worker):
        get_worker_info().dataset.opened = 100

    loader = DataLoader(Opened(4), 2, num_workers=1, worker_init_fn=open_it, multiprocessing_context="fork")
    assert values(prepare_data_loader(loader)) == [[100, 101], [102, 103]]


def test_streams_that_are_divided_already_are_left_alone():
    stream = Pieces(((4, 5),))
    stream._distributed = SimpleNamespace(rank=1, world_size=2)
    prepared = prepare_data_loader(DataLoader(stream, 2), **TWO)
    assert prepared.dataset is stream and values(prepared) == [[4, 5]]
    prepared = prepare_data_loader(DataLoader(stream, 2), put_on_device=True, **TWO)
    assert type(prepared) is DataLoaderShard, "dispatching would read the main process's part only"


def test_a_seedable_sampler_keeps_the_settings_and_the_seed():
    torch.manual_seed(31)
    random = RandomSampler(Numbers(8), replacement=True, num_samples=5)
    sampler = prepare_data_loader(DataLoader(Numbers(8), 2, sampler=random), use_seedable_sampler=True).get_sampler()
    assert (sampler.replacement, sampler.num_samples, sampler.initial_seed) == (True, 5, 31)
    plain = prepare_data_loader(DataLoader(Numbers(8), 2), use_seedable_sampler=True)
    assert not isinstance(plain.get_sampler(), RandomSampler)


def test_contradictions_are_refused():
    loader = DataLoader(Numbers(8), 3)
    with pytest.raises(TypeError, match="dataloader is a list"):
        prepare_data_loader([1])
    with pytest.raises(ValueError, match="2 equal parts, which a batch size of 3 does not"):
        prepare_data_loader(loader, split_batches=True, **TWO)
    with pytest.raises(ValueError, match="batch size of None"):
        prepare_data_loader(DataLoader(Numbers(8), batch_sampler=[[0]]), split_batches=True, **TWO)


def test_without_an_extension_that_dispatches_each_rank_reads_a_stream(monkeypatch):
    monkeypatch.setattr(build, "all_specs", tuple)
    loader = prepare_data_loader(DataLoader(Stream(8), 2), put_on_device=True, **TWO)
    assert type(loader._reading) is reading.ReadsEverything and values(loader) == [[2, 3], [6, 7]]
    for options in ({"dispatch_batches": True}, {"slice_fn_for_dispatch": max}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}.* an extension that is not in this installation"):
            prepare_data_loader(DataLoader(Stream(8), 2), put_on_device=True, **options)


def test_a_loader_prepared_already_is_warned_about():
    prepared = prepare_data_loader(DataLoader(Numbers(8), 2), **TWO)
    with pytest.warns(UserWarning, match="prepared already"):
        assert prepare_data_loader(prepared, **TWO) is prepared
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_data_loader(DataLoader(Numbers(8), 2), put_on_device=True, rng_types=["torch"], **TWO)


@pytest.mark.parametrize("kind", ["generator", RNGType.GENERATOR])
def test_a_generator_is_synchronised_once_and_where_something_shuffles(kind):
    for ranks in ({}, TWO):
        assert list(prepare_data_loader(DataLoader(range(4), 1), rng_types=[kind], **ranks))  # it has no generator
    shuffled = prepare_data_loader(DataLoader(range(4), 1, shuffle=True), rng_types=[kind], **TWO)
    assert len(shuffled.rng_types) == 1 and len(list(shuffled)) == 2


class Drawn(Numbers):
    def __getitem__(self, index):
        return torch.rand(())


def test_workers_of_two_loaders_draw_other_numbers_and_those_of_the_same_run_the_same():
    def views():
        torch.manual_seed(0)
        loaders = [prepare_data_loader(DataLoader(Drawn(4), 2, num_workers=1)) for _ in range(2)]
        return [torch.cat(list(loader)) for loader in loaders]

    first, second = views()
    assert not torch.equal(first, second) and all(map(torch.equal, (first, second), views()))


def mesh(names, shape):
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names)


def test_a_mesh_that_does_not_tell_is_refused():
    with pytest.raises(ValueError, match="dimension names None"):
        ShardLayout.of_all(2, mesh(None, (2,)))
    with pytest.raises(ValueError, match="holds process 2 0 times"):
        ShardLayout.of_all(6, mesh(("dp_shard",), (2,)))
