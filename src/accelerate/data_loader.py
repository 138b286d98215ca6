"""Loaders that give every process its part of the data.

`prepare_data_loader` turns a torch loader into one that is sharded (`DataLoaderShard`) or dispatched
(`DataLoaderDispatcher`); `skip_first_batches` leaves out what an interrupted epoch has behind it.
"""

from accelerate.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, get_sampler
from accelerate.data.budget import PackingCollator, TokenBudgetSampler
from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.dispatcher import DataLoaderDispatcher
from accelerate.data.iterable import IterableDatasetShard
from accelerate.data.loader import DataLoaderShard, SkipDataLoader
from accelerate.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "PackingCollator",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "TokenBudgetSampler",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
