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
from accelerate.data import lengths, planner, xla
from accelerate.data.adapter import as_stateful, is_stateful, iterates_plainly, variant
from accelerate.data.dispatcher import DataLoaderDispatcher
from accelerate.data.iterable import (
    CountingCollate,
    IterableDatasetShard,
    PlainStream,
    can_shard_itself,
    check_split,
    differs_between_ranks,
    is_datapipe,
    is_split_by_node,
)
from accelerate.data.loader import DataLoaderShard, PreparedLoader
from accelerate.data.plan import (
    BY_PIECES,
    DISPATCHED,
    EVERYTHING,
    OWN_SHARD,
    SPLIT_ALREADY,
    ShardLayout,
)
from accelerate.data.samplers import ReplayableRandomSampler, SeedableRandomSampler, draw_seed
from accelerate.data.seeding import SeededDataset
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
    shard_iterable_dataset: bool = True,
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
        shard_iterable_dataset: False says that a stream gives every process its own part already: it is neither divided
            nor dispatched. Recognised without it are streams after `datasets.distributed.split_dataset_by_node`,
            WebDataset's `split_by_node`, and torch datapipes with a `sharding_filter`.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`; on XLA devices wrapped into torch_xla's loader.

    Raises:
        TypeError: `dataloader` is not a torch loader.
        ValueError: the arguments contradict each other, the batch size cannot be split, or the dataset was split among
            another number of nodes.
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
    num_processes = state.num_processes if num_processes is None else num_processes
    process_index = state.process_index if process_index is None else process_index
    layout = ShardLayout.of(num_processes, process_index, torch_device_mesh)
    stream = lengths.is_stream(dataloader)
    divided = stream and _is_divided(dataloader.dataset, layout, shard_iterable_dataset)
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
        dataloader = _with_seedable_sampler(dataloader, num_processes, data_seed)
    generator = _shared_generator(dataloader, num_processes, dispatch)
    ReplayableRandomSampler.adopt(lengths.get_sampler(dataloader))

    reading = _reading(dataloader, layout, num_processes, divided=divided, dispatch=dispatch)
    plan = planner.make(
        dataloader,
        layout,
        reading=reading,
        num_processes=num_processes,
        process_index=process_index,
        mesh=torch_device_mesh,
        split_batches=split_batches,
        even_batches=even_batches,
    )
    changes = _changes(dataloader, layout, reading, split_batches, even_batches)
    stateful = use_stateful_dataloader or is_stateful(dataloader)
    base = as_stateful(dataloader, **changes) if stateful else variant(dataloader, **changes)
    common = {
        "use_stateful_dataloader": stateful,
        "_drop_last": plan.drop_last,
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "_base": base,
    }
    on_xla = not dispatch and put_on_device and traits.of(state.distributed_type).xla
    if dispatch:
        loader = DataLoaderDispatcher(
            base.dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **common
        )
    else:
        loader = DataLoaderShard(
            base.dataset,
            device=device if put_on_device and not on_xla else None,
            rng_types=_effective_rng_types(rng_types, generator),
            synchronized_generator=generator,
            **common,
        )
    loader.plan = plan
    if state.is_main_process:
        logger.info("Prepared a data loader: %s.", plan.summary)
    return xla.wrap(loader, device) if on_xla else loader


def _is_divided(dataset: Any, layout: ShardLayout, shard_iterable_dataset: bool) -> bool:
    """Whether a stream gives every process its own part already."""
    if not shard_iterable_dataset:
        return True
    check_split(dataset, layout.num_shards, layout.shard_index)
    return is_split_by_node(dataset, layout.num_shards)


def _reading(dataloader: DataLoader, layout: ShardLayout, num_processes: int, *, divided: bool, dispatch: bool) -> str:
    """How the data is read; for streams that several processes read, warns if they will read different orders."""
    if dispatch:
        return DISPATCHED
    if not lengths.is_stream(dataloader):
        return OWN_SHARD
    communicator = comm.current()
    if min(communicator.world_size, num_processes) > 1 and differs_between_ranks(
        dataloader.dataset, communicator.gather_object
    ):
        warnings.warn(
            "The dataset was shuffled without a seed, so each process has it in another order and their parts overlap. "
            "Use dataset.shuffle(seed=...) with the same seed on all processes, or dispatch_batches=True.",
            stacklevel=3,
        )
    if divided:
        return SPLIT_ALREADY
    by_pieces = layout.num_shards > 1 and can_shard_itself(dataloader.dataset, layout.num_shards)
    return BY_PIECES if by_pieces else EVERYTHING


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


def _effective_rng_types(rng_types: list[Any] | None, generator: torch.Generator | None) -> list[Any] | None:
    """The generators to synchronise; "generator" only if there is one (nothing shuffles otherwise)."""
    if rng_types is None or generator is not None:
        return rng_types
    return [kind for kind in rng_types if kind != "generator"]


def _with_seedable_sampler(dataloader: DataLoader, num_processes: int, data_seed: int | None) -> DataLoader:
    """The loader with a sampler that depends on a seed and the epoch, equal on all processes, if it shuffles."""
    sampler = lengths.get_sampler(dataloader)
    if not isinstance(sampler, RandomSampler) or (isinstance(sampler, SeedableRandomSampler) and data_seed is None):
        return dataloader
    seedable = SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator() if sampler.generator is None else sampler.generator,
        data_seed=_from_main_process(torch.initial_seed(), num_processes) if data_seed is None else data_seed,
    )
    dataloader = variant(dataloader)
    if type(dataloader.batch_sampler) is BatchSampler:
        # The caller's loader keeps its own batch sampler, and with it its own order.
        vars(dataloader)["batch_sampler"] = copy.copy(dataloader.batch_sampler)
    lengths.set_sampler(dataloader, seedable)
    return dataloader


def _from_main_process(value: int, num_processes: int) -> int:
    """The main process's value, where several processes really read."""
    communicator = comm.current()
    if communicator.world_size == 1 or num_processes == 1:
        return value
    values = [value]
    communicator.broadcast_object_list(values, 0)
    return values[0]


def _shared_generator(dataloader: DataLoader, num_processes: int, dispatch: bool) -> torch.Generator | None:
    """The generator that shuffles, if the processes have to agree on it; made here if the sampler has none.

    A sampler without a generator draws from torch's default one, which differs between processes as soon as one of them
    has used it more than another; then their shards overlap, and processes that share one shard read different batches.
    """
    if dispatch or num_processes == 1:
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


def _changes(
    dataloader: DataLoader, layout: ShardLayout, reading: str, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """The parts of the loader that change when it is prepared."""
    dataset = dataloader.dataset
    if reading == DISPATCHED or (layout.num_shards == 1 and reading != SPLIT_ALREADY):
        # Only one process iterates: a datapipe would wait for the others.
        changes = {"dataset": PlainStream(dataset)} if reading == DISPATCHED and is_datapipe(dataset) else {}
    elif lengths.is_stream(dataloader):
        changes = _sharded_stream(dataloader, layout, reading, split_batches)
    else:
        changes = _sharded(dataloader, layout, split_batches, even_batches)
    if dataloader.num_workers and not lengths.is_stream(dataloader) and type(dataset) is not SeededDataset:
        changes["dataset"] = SeededDataset(dataset)
    return changes


def _sharded(dataloader: DataLoader, layout: ShardLayout, split_batches: bool, even_batches: bool) -> dict[str, Any]:
    outer = lengths.batching_sampler(dataloader)
    shards, index = layout.num_shards, layout.shard_index
    if dataloader.batch_sampler is None and not isinstance(outer, BatchSampler):
        return {"sampler": SamplerShard(outer, shards, index, even_batches)}
    shard = BatchSamplerShard(outer, shards, index, split_batches=split_batches, even_batches=even_batches)
    if dataloader.batch_sampler is None:
        return {"sampler": shard}
    size = dataloader.batch_size
    return {"batch_sampler": shard, "batch_size": size // shards if size and split_batches else size}


def _sharded_stream(dataloader: DataLoader, layout: ShardLayout, reading: str, split_batches: bool) -> dict[str, Any]:
    dataset, shards, index = dataloader.dataset, layout.num_shards, layout.shard_index
    size = dataloader.batch_size
    if split_batches:
        size //= shards
    if reading == SPLIT_ALREADY:
        part = dataset
    elif reading == BY_PIECES:
        part = dataset.shard(num_shards=shards, index=index)
    else:
        part = IterableDatasetShard(
            dataset,
            batch_size=dataloader.batch_size or 1,
            drop_last=dataloader.drop_last,
            num_processes=shards,
            process_index=index,
            split_batches=split_batches,
        )
    changes = {"dataset": part}
    if dataloader.num_workers and isinstance(part, IterableDatasetShard) and iterates_plainly(dataloader):
        changes["collate_fn"] = CountingCollate(dataloader.collate_fn, part)
    if size == dataloader.batch_size:
        return changes
    return {
        **changes,
        "batch_size": size,
        "batch_sampler": BatchSampler(dataloader.sampler, size, dataloader.drop_last),
    }
