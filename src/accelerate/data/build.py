"""From a torch loader to a prepared one: decide who reads what, once, then build the loader that does it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accelerate import comm
from accelerate.data import lengths, xla
from accelerate.data.adapter import as_stateful, is_stateful, variant
from accelerate.data.dispatcher import DataLoaderDispatcher
from accelerate.data.iterable import IterableDatasetShard, can_shard_itself, is_split_by_node
from accelerate.data.loader import DataLoaderShard, PreparedLoader
from accelerate.data.plan import ShardLayout
from accelerate.data.samplers import ReplayableRandomSampler, SeedableRandomSampler, draw_seed
from accelerate.data.shards import BatchSamplerShard, SamplerShard
from accelerate.process import PartialState
from accelerate.runtime import traits

logger = logging.getLogger(__name__)


def prepare_data_loader(
    dataloader: DataLoader,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any | None = None,
) -> DataLoader:
    """Make a loader that gives each process its part of the data, on its device.

    Every process calls this with the same arguments. Sharding reads the data on every process and keeps a part;
    dispatching reads on the main process and sends the parts.

    Args:
        dataloader: the loader over the whole data.
        device: where batches go, with `put_on_device`. By default the device of this process.
        num_processes: number of parts. By default the number of processes.
        process_index: the part of this process. By default its rank.
        split_batches: the batch size of `dataloader` is that of all processes together, and is divided; otherwise
            every process gets batches of that size.
        put_on_device: move batches to the device.
        rng_types: random generators to take over from the main process at the start of every epoch: "torch", "cuda",
            "xla", "generator" and so on. "generator" is the one that shuffles.
        dispatch_batches: read on the main process and send. By default done for iterable datasets that are not
            split by node already, if batches are put on a device.
        even_batches: complete the last round with samples from the beginning, so that all processes take the same
            number of steps. Dispatched loaders always do.
        slice_fn_for_dispatch: cuts a process's part from a dispatched batch, called as
            `fn(batch, slice, process_index=..., num_processes=...)`.
        use_seedable_sampler: replace a `RandomSampler` by a `SeedableRandomSampler`.
        data_seed: the seed of that sampler. By default that of torch's default generator on the main process.
        non_blocking: let copies from pinned memory overlap with computation.
        use_stateful_dataloader: use torchdata's `StatefulDataLoader`, whose position can be saved.
        torch_device_mesh: device mesh of the run. Ranks that differ only along `tp`, `cp` or `sp` get the same batches.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`; on XLA devices wrapped into torch_xla's loader.

    Raises:
        TypeError: `dataloader` is not a torch loader.
        ValueError: the arguments contradict each other, or the batch size cannot be split.
        ImportError: `use_stateful_dataloader` without torchdata 0.8 or later.

    Example:
        >>> whole = DataLoader(range(8), batch_size=2)
        >>> part = prepare_data_loader(whole, num_processes=2, process_index=1)  # of the second of two processes
        >>> [batch.tolist() for batch in part]
        [[2, 3], [6, 7]]
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"dataloader is a {type(dataloader).__name__}; pass a torch.utils.data.DataLoader.")
    if isinstance(dataloader, PreparedLoader):
        warnings.warn(
            "dataloader is prepared already; it is returned as it is, not sharded a second time.", stacklevel=2
        )
        return dataloader
    state = PartialState()
    layout = ShardLayout.of(
        state.num_processes if num_processes is None else num_processes,
        state.process_index if process_index is None else process_index,
        torch_device_mesh,
    )
    stream = lengths.is_stream(dataloader)
    divided = stream and is_split_by_node(dataloader.dataset, layout.num_shards)
    dispatch = (stream and put_on_device and not divided) if dispatch_batches is None else dispatch_batches
    if dispatch and divided:
        warnings.warn(
            "dispatch_batches=True reads on the main process only, but the dataset is split by node: the parts of the "
            "other processes will not be read. Use dispatch_batches=False, or do not split the dataset.",
            stacklevel=2,
        )
    _check(dataloader, layout, split_batches, put_on_device, dispatch, even_batches, slice_fn_for_dispatch)
    if put_on_device and device is None:
        device = state.device

    if use_seedable_sampler:
        dataloader = _with_seedable_sampler(dataloader, layout, data_seed)
    generator = _shared_generator(dataloader, layout, dispatch)
    ReplayableRandomSampler.adopt(lengths.get_sampler(dataloader))

    changes = {} if dispatch or layout.num_shards == 1 else _sharded(dataloader, layout, split_batches, even_batches)
    stateful = use_stateful_dataloader or is_stateful(dataloader)
    base = as_stateful(dataloader, **changes) if stateful else variant(dataloader, **changes)
    common = {
        "use_stateful_dataloader": stateful,
        "_drop_last": _drops_last(dataloader),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "_base": base,
    }
    if dispatch:
        return DataLoaderDispatcher(
            base.dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **common
        )
    on_xla = put_on_device and traits.of(state.distributed_type).xla
    loader = DataLoaderShard(
        base.dataset,
        device=device if put_on_device and not on_xla else None,
        rng_types=_effective_rng_types(rng_types, generator),
        synchronized_generator=generator,
        **common,
    )
    return xla.wrap(loader, device) if on_xla else loader


def _check(
    dataloader: DataLoader,
    layout: ShardLayout,
    split_batches: bool,
    put_on_device: bool,
    dispatch: bool,
    even_batches: bool,
    slice_fn: Callable[..., Any] | None,
) -> None:
    """Refuse what cannot work and warn of what would be ignored."""
    if dispatch and not put_on_device:
        raise ValueError(
            "dispatch_batches=True needs put_on_device=True: the batches arrive on the device of each process."
        )
    if dispatch and not even_batches and layout.num_shards > 1:
        warnings.warn(
            "even_batches=False has no effect on a dispatched loader: its last round is always completed. Use "
            "dispatch_batches=False, or drop_last=True in the dataloader.",
            stacklevel=3,
        )
    if slice_fn is not None and not dispatch:
        warnings.warn(
            "slice_fn_for_dispatch has no effect, because this loader does not dispatch. Pass dispatch_batches=True.",
            stacklevel=3,
        )
    if split_batches:
        sampler = lengths.batching_sampler(dataloader)
        size = dataloader.batch_size if dataloader.batch_size is not None else getattr(sampler, "batch_size", None)
        if size is None:
            raise ValueError(
                "split_batches=True needs a batch size, but neither dataloader.batch_size nor that of its batch sampler "
                f"({type(sampler).__name__}) is set. Give the batch sampler a batch_size, or use split_batches=False."
            )
        if size % layout.num_shards:
            raise ValueError(
                f"split_batches=True divides the batch size of {size} among {layout.num_shards} processes, which does "
                f"not come out even. Use a batch_size that is a multiple of {layout.num_shards}, or split_batches=False."
            )


def _drops_last(dataloader: DataLoader) -> bool:
    return bool(dataloader.drop_last or getattr(lengths.batching_sampler(dataloader), "drop_last", False))


def _effective_rng_types(rng_types: list[Any] | None, generator: torch.Generator | None) -> list[Any] | None:
    """The generators to synchronise; "generator" only if there is one (nothing shuffles otherwise)."""
    if rng_types is None or generator is not None:
        return rng_types
    return [kind for kind in rng_types if kind != "generator"]


def _with_seedable_sampler(dataloader: DataLoader, layout: ShardLayout, data_seed: int | None) -> DataLoader:
    """The loader with a sampler that depends on a seed and the epoch, equal on all processes, if it shuffles."""
    sampler = lengths.get_sampler(dataloader)
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return dataloader
    seedable = SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator() if sampler.generator is None else sampler.generator,
        data_seed=_from_main_process(torch.initial_seed(), layout) if data_seed is None else data_seed,
    )
    dataloader = variant(dataloader)
    if type(dataloader.batch_sampler) is BatchSampler:
        # The caller's loader keeps its own batch sampler, and with it its own order.
        vars(dataloader)["batch_sampler"] = copy.copy(dataloader.batch_sampler)
    lengths.set_sampler(dataloader, seedable)
    return dataloader


def _from_main_process(value: int, layout: ShardLayout) -> int:
    """The main process's value, where the parts really are in several processes."""
    communicator = comm.current()
    if communicator.world_size == 1 or layout.num_shards == 1:
        return value
    values = [value]
    communicator.broadcast_object_list(values, 0)
    return values[0]


def _shared_generator(dataloader: DataLoader, layout: ShardLayout, dispatch: bool) -> torch.Generator | None:
    """The generator that shuffles, if the processes have to agree on it; made here if the sampler has none.

    A sampler without a generator draws from torch's default one, which differs between processes as soon as one of them
    has used it more than another; then their shards overlap.
    """
    if dispatch or layout.num_shards == 1:
        return None
    if lengths.is_stream(dataloader):
        generator = getattr(dataloader.dataset, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None
    sampler = lengths.get_sampler(dataloader)
    if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(draw_seed())
    return sampler.generator if isinstance(sampler.generator, torch.Generator) else None


def _sharded(dataloader: DataLoader, layout: ShardLayout, split_batches: bool, even_batches: bool) -> dict[str, Any]:
    """The parts of the loader that change when it reads one shard only."""
    if lengths.is_stream(dataloader):
        return _sharded_stream(dataloader, layout, split_batches)
    outer = lengths.batching_sampler(dataloader)
    shards, index = layout.num_shards, layout.shard_index
    if dataloader.batch_sampler is None and not isinstance(outer, BatchSampler):
        return {"sampler": SamplerShard(outer, shards, index, even_batches)}
    shard = BatchSamplerShard(outer, shards, index, split_batches=split_batches, even_batches=even_batches)
    if dataloader.batch_sampler is None:
        return {"sampler": shard}
    size = dataloader.batch_size
    return {"batch_sampler": shard, "batch_size": size // shards if size and split_batches else size}


def _sharded_stream(dataloader: DataLoader, layout: ShardLayout, split_batches: bool) -> dict[str, Any]:
    dataset, shards, index = dataloader.dataset, layout.num_shards, layout.shard_index
    size = dataloader.batch_size
    if split_batches:
        size //= shards
    if is_split_by_node(dataset, shards):
        logger.info("The stream is split by node already: process %d of %d reads its own part.", index, shards)
        part = dataset
    elif can_shard_itself(dataset, shards):
        part = dataset.shard(num_shards=shards, index=index)
        logger.info("The stream has pieces for all: process %d of %d reads only its own.", index, shards)
    else:
        part = IterableDatasetShard(
            dataset,
            batch_size=dataloader.batch_size or 1,
            drop_last=dataloader.drop_last,
            num_processes=shards,
            process_index=index,
            split_batches=split_batches,
        )
        logger.info("Process %d of %d reads the whole stream and keeps its part.", index, shards)
    if size == dataloader.batch_size:
        return {"dataset": part}
    return {
        "dataset": part,
        "batch_size": size,
        "batch_sampler": BatchSampler(dataloader.sampler, size, dataloader.drop_last),
    }
