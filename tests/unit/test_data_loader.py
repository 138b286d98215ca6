"""The front: one object under the recorded path."""

import pickle

import torch
from torch.utils.data import DataLoader

import accelerate.data_loader as front
from accelerate.data import adapter, build, loader, samplers


def test_the_front_shows_the_objects_themselves():
    assert front.prepare_data_loader is build.prepare_data_loader
    assert front.skip_first_batches is build.skip_first_batches
    assert front.get_sampler is adapter.get_sampler
    assert front.DataLoaderShard is loader.DataLoaderShard


def test_classes_name_the_public_path():
    for name in front.__all__:
        member = getattr(front, name)
        if isinstance(member, type):
            assert member.__module__ == "accelerate.data_loader", name


def test_samplers_pickle_by_the_public_path():
    sampler = samplers.SeedableRandomSampler(range(4), data_seed=1)
    shard = samplers.BatchSamplerShard(torch.utils.data.BatchSampler(sampler, 2, False), 2, 1)
    assert list(pickle.loads(pickle.dumps(shard))) == list(shard)


def test_loader_classes_of_torch_are_not_hidden():
    assert isinstance(front.prepare_data_loader(DataLoader([1, 2])), DataLoader)
