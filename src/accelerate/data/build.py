"""From a torch loader to a prepared one: decide who reads what, once, then build the loader that does it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accelerate import comm
from accelerate.base._warn import warn_user
from accelerate.config.enums import RNGType
from accelerate.config.strategies import record_of
from accelerate.data import adapter, iterable
from accelerate.data.adapter import as_stateful, batching_sampler, is_stateful, is_stream, skipping, variant
from accelerate.data.layout import ShardLayout
from accelerate.data.loader import DataLoaderShard, PreparedLoader, SkipDataLoader
from accelerate.data.reading import AlreadySplit, ByPieces, Dispatched, OwnShard, Reading, ReadsEverything
from accelerate.data.samplers import SeedableRandomSampler, check_split, draw_seed
from accelerate.data.workers import EpochStream, SeededDataset, WorkerDataset
from accelerate.extension import all_specs, imported
from accelerate.process import PartialState

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
    already_sharded: bool = False,
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
        already_sharded: True says the same of any loader. Recognised without it, with a warning, are samplers and batch
            samplers that know their rank, such as torch's `DistributedSampler`.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`; on XLA devices one that torch_xla's loader reads for.

    Raises:
        TypeError: `dataloader` is not a torch loader.
        ValueError: the arguments contradict each other, the batch size cannot be split, or the dataset or its sampler
            was divided among another number of processes, or gives the part of another one.
        ImportError: `use_stateful_dataloader` without torchdata 0.8 or later.

    Example:
        >>> whole = DataLoader(range(8), batch_size=2)
        >>> part = prepare_data_loader(whole, num_processes=2, process_index=1)  # of the second of two processes
        >>> [batch.tolist() for batch in part]
        [[2, 3], [6, 7]]
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"dataloader is a {type(dataloader).__name__}; pass a torch.utils.data.DataLoader.")
    skipped = 0
    if type(dataloader) is SkipDataLoader:  # of a stream that is not sharded yet
        dataloader, skipped = dataloader.base_dataloader, dataloader.skip_batches
    if isinstance(dataloader, PreparedLoader):
        warn_user("dataloader is prepared already; it is returned as it is, not sharded again.")
        return dataloader
    dispatching = _dispatching(required=bool(dispatch_batches) or slice_fn_for_dispatch is not None)
    state = PartialState()
    num_processes = state.num_processes if num_processes is None else num_processes
    process_index = state.process_index if process_index is None else process_index
    layouts = ShardLayout.of_all(num_processes, torch_device_mesh)
    layout = layouts[process_index]
    # A caller who asks for one part among several processes divides nothing, as a sampler may have done it.
    expected = (
        ShardLayout(state.num_processes, state.process_index) if num_processes == 1 < state.num_processes else layout
    )
    divided = already_sharded or _is_divided(dataloader, layout, expected, shard_iterable_dataset, dispatch_batches)
    way = _way_of_reading(dataloader, layout.num_shards, divided, dispatch_batches, put_on_device, dispatching)
    dispatch = issubclass(way, Dispatched)
    if slice_fn_for_dispatch is not None and not dispatch:
        warn_user(
            "slice_fn_for_dispatch has no effect, because this loader does not dispatch. Pass dispatch_batches=True."
        )
    if split_batches:
        size, batching = dataloader.batch_size, batching_sampler(dataloader)
        check_split(getattr(batching, "batch_size", None) if size is None else size, layout.num_shards)
    if use_seedable_sampler:
        dataloader = _with_seedable_sampler(dataloader, num_processes, data_seed)
    # A batch sampler whose steps are made for a number of ranks.
    if way is OwnShard and hasattr(batching_sampler(dataloader), "check_ranks"):
        batching_sampler(dataloader).check_ranks(layout.num_shards)
    generator = None if dispatch or num_processes == 1 else _shared_generator(dataloader)
    if rng_types is not None:
        rng_types = _synchronised(rng_types, dataloader, generator)

    reading = way(dataloader, layouts, process_index, split_batches, even_batches)
    if isinstance(reading, Dispatched):
        reading.slice_fn = slice_fn_for_dispatch
    changes = reading.sharded()
    changes |= _for_workers(dataloader, changes.get("dataset", dataloader.dataset))
    stateful = use_stateful_dataloader or is_stateful(dataloader)
    base = as_stateful(dataloader, **changes) if stateful else variant(dataloader, **changes)
    common = {
        "skip_batches": skipped,
        "use_stateful_dataloader": stateful,
        "_drop_last": reading.drop_last,
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "_base": base,
    }
    if isinstance(reading, Dispatched):
        loader: PreparedLoader = reading.prepared(base.dataset, **common)
    else:
        loader_class = record_of(state.distributed_type).loader if put_on_device else ""
        kind = imported(loader_class)() if loader_class else DataLoaderShard
        own_device = (state.device if device is None else device) if put_on_device else None
        loader = kind(base.dataset, own_device, rng_types, generator, **common)
    loader._reading = reading
    if state.is_main_process:
        logger.info("Prepared a data loader of %d shards; read: %s.", layout.num_shards, way.name)
    return loader


def _is_divided(
    dataloader: DataLoader, layout: ShardLayout, expected: ShardLayout, shard_streams: bool, dispatch: bool | None
) -> bool:
    """Whether the data says that it is divided, which a warning tells of a sampler; ValueError if for other processes."""
    if is_stream(dataloader):
        return not shard_streams or iterable.is_split_by_node(dataloader.dataset, layout.num_shards)
    division = adapter.division(dataloader)
    if division is None:
        return False
    sampler, parts, index = division
    gives = f"The loader's sampler ({type(sampler).__name__}) gives part {index} of {parts} already"
    if (parts, index) != (expected.num_shards, expected.shard_index):
        raise ValueError(
            f"{gives}, but this process reads part {expected.shard_index} of {expected.num_shards}: data "
            "would be read twice, or not at all. Build the sampler for that part (processes that differ only along tp, cp or "
            "sp share one), omit it, since `prepare` divides a plain loader, or pass "
            "DataLoaderConfiguration(already_sharded=True) to read exactly what it gives."
        )
    if layout.num_shards > 1 and not dispatch:
        warn_user(
            f"{gives}, so it is read as it is: each process reads exactly what its own "
            "sampler gives. `prepare` divides a plain loader; or say that it is divided, with "
            "DataLoaderConfiguration(already_sharded=True)."
        )
    return True


def _dispatching(required: bool) -> str:
    """Return the address of an extension's way of reading that dispatches, an empty text if there is none; ValueError if required."""
    address = next((spec.dispatch for spec in all_specs() if spec.dispatch), "")
    if required and not address:
        raise ValueError(
            "dispatch_batches=True and slice_fn_for_dispatch need an extension that is not in this installation of accelerate. Remove "
            "the setting, so that each rank reads its part, or install the complete package."
        )
    return address


def _way_of_reading(
    dataloader: DataLoader, shards: int, divided: bool, dispatch: bool | None, put_on_device: bool, dispatching: str
) -> type[Reading]:
    """Choose how the data is read; warn of parts that no process would read."""
    stream = is_stream(dataloader)
    if dispatch and not put_on_device:
        raise ValueError("dispatch_batches=True needs put_on_device=True: batches arrive on a process's device.")
    if dispatch or (dispatching and dispatch is None and stream and put_on_device and not divided):
        if divided:
            warn_user(
                "dispatch_batches=True reads on the main process only, but the data is divided already: the parts of the "
                "other processes will not be read. Use dispatch_batches=False, or do not divide the data."
            )
        way: type[Dispatched] = imported(dispatching)
        return way
    if divided:
        return AlreadySplit
    if not stream:
        return OwnShard
    in_pieces = shards > 1 and iterable.can_shard_itself(dataloader.dataset, shards)
    return ByPieces if in_pieces else ReadsEverything


def _with_seedable_sampler(dataloader: DataLoader, num_processes: int, seed: int | None) -> DataLoader:
    """The loader with a sampler that depends on a seed and the epoch, equal on all processes, if it shuffles."""
    sampler, communicator = adapter.get_sampler(dataloader), comm.current()
    if not isinstance(sampler, RandomSampler) or (isinstance(sampler, SeedableRandomSampler) and seed is None):
        return dataloader
    if seed is None:
        seed = torch.initial_seed()
        if communicator.world_size > 1 and num_processes > 1:
            [seed] = communicator.broadcast_object_list([seed], 0)
    generator = torch.Generator() if sampler.generator is None else sampler.generator
    drawn = (sampler.data_source, sampler.replacement, sampler._num_samples, generator)
    seedable = SeedableRandomSampler(*drawn, data_seed=seed)
    dataloader = variant(dataloader)
    if type(dataloader.batch_sampler) is BatchSampler:
        # The caller's loader keeps its own batch sampler, and with it its own order.
        vars(dataloader)["batch_sampler"] = copy.copy(dataloader.batch_sampler)
    adapter.set_sampler(dataloader, seedable)
    return dataloader


def _shared_generator(dataloader: DataLoader) -> torch.Generator | None:
    """Return the generator that shuffles, if the processes have to share its state, or make it.

    A sampler without one draws from torch's default generator, which differs between processes as soon as one of them
    has used it more than another; then shards overlap.
    """
    sampler = adapter.get_sampler(dataloader)
    generator = adapter.shuffling_generator(dataloader, sampler)
    seeded = is_stream(dataloader) or isinstance(sampler, SeedableRandomSampler)
    if not seeded and hasattr(sampler, "generator") and sampler.generator is None:
        generator = sampler.generator = torch.Generator().manual_seed(draw_seed())
        sampler.generator_is_ours = True
    return generator


def _synchronised(kinds: list[Any], dataloader: DataLoader, generator: torch.Generator | None) -> list[Any]:
    """The kinds of generators that are synchronised at each epoch, with the one that shuffles if there is one of ours."""
    others = [kind for kind in kinds if kind not in ("generator", RNGType.GENERATOR)]
    if generator is None:  # nothing shuffles
        return others
    # No other process has a generator that was created here: without its synchronisation the parts would overlap.
    ours = getattr(adapter.get_sampler(dataloader), "generator_is_ours", False)
    return [*others, "generator"] if ours or len(others) < len(kinds) else others


def _for_workers(loader: DataLoader, dataset: Any) -> dict[str, Any]:
    """Wrap a dataset whose workers have to know the epoch."""
    if not loader.num_workers or issubclass(type(loader.dataset), WorkerDataset):
        return {}
    if not is_stream(loader):
        return {"dataset": SeededDataset(dataset)}
    hears = loader.persistent_workers and callable(getattr(dataset, "set_epoch", None))
    return {"dataset": EpochStream(dataset)} if hears else {}


# Leaving out the beginning of an epoch -----------------------------------------------------------------------------------


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """Make a loader that omits the first batches of an epoch.

    With a map-style dataset the batches are omitted by their indices and never loaded; a stream has to be read and
    dropped. Of a prepared loader the result is a view: the two count epochs together, so that after the shortened epoch
    the original continues with the next one. Every process has to call it with the same number.

    Not a collective.

    Args:
        dataloader: a prepared loader, or a torch loader.
        num_batches: number of batches to omit, as a process counts them.

    Returns:
        A loader over the remaining batches; the given one if there is nothing to omit.

    Raises:
        TypeError: `dataloader` is not a torch loader.
        ValueError: `num_batches` is negative, or more than the loader has.

    Example:
        >>> loader = DataLoader(range(6), batch_size=2)
        >>> for epoch in (3, 4):  # epoch 3 was interrupted after two batches
        ...     batches = skip_first_batches(loader, 2) if epoch == 3 else loader
        ...     print(epoch, [batch.tolist() for batch in batches])
        3 [[4, 5]]
        4 [[0, 1], [2, 3], [4, 5]]
    """
    num_batches = math.ceil(num_batches or 0)
    if num_batches < 0:
        raise ValueError(f"num_batches is {num_batches}; pass the number of batches to omit, 0 or more.")
    # What DeepSpeed's sequence parallelism hands out is no torch loader.
    if hasattr(type(dataloader), "_skipping_parts"):
        return dataloader._skipping_parts(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"dataloader is a {type(dataloader).__name__}; pass a torch.utils.data.DataLoader.")
    if num_batches == 0:
        return dataloader
    # Not that of streams, which is a promise at best.
    length = None if is_stream(dataloader) else adapter.known_length(len, dataloader)
    if length is not None and num_batches > length:
        raise ValueError(
            f"num_batches is {num_batches}, but the loader has {length} batches in an epoch. Count the batches of the "
            "interrupted epoch alone: steps % len(dataloader)."
        )
    if isinstance(dataloader, PreparedLoader):
        return dataloader._skipping(num_batches)
    if not is_stream(dataloader):
        return skipping(dataloader, num_batches)
    return SkipDataLoader(dataloader.dataset, num_batches, is_stateful(dataloader), _base=variant(dataloader))
