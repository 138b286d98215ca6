"""Loaders that give every process its part of the data.

`prepare_data_loader` turns a torch loader into one that is sharded (`DataLoaderShard`) or dispatched
(`DataLoaderDispatcher`); `skip_first_batches` skips the batches of an interrupted epoch.
"""

from accelerate.base import _lazy
from accelerate.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, get_sampler
from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.iterable import IterableDatasetShard
from accelerate.data.loader import DataLoaderShard, SkipDataLoader
from accelerate.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from accelerate.logging import get_logger

__getattr__ = _lazy.aliases(__name__)

logger = get_logger(__name__)

# Arguments of a torch loader, except the dataset, that programs copy it by, with torch's defaults.
_PYTORCH_DATALOADER_KWARGS = {
    "batch_size": 1,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
# Arguments of a later torch.
v, additional_kwargs = "2.6.0", {"in_order": True}
_PYTORCH_DATALOADER_ADDITIONAL_KWARGS = {v: additional_kwargs}

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",  # noqa: F822  # of an extension, by `__getattr__`
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
