"""From a torch loader to a prepared one: decide who reads what, once, then build the loader that does it."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accelerate import comm
from accelerate.data import adapter, iterable, plan
from accelerate.data.adapter import as_stateful, batching_sampler, get_sampler, is_stream, variant
from accelerate.data.dispatcher import DataLoaderDispatcher
from accelerate.data.iterable import CountingCollate, IterableDatasetShard
from accelerate.data.loader import DataLoaderShard, PreparedLoader, SkipDataLoader, skipping
from accelerate.data.plan import DataPlan, ShardLayout
from accelerate.data.resume import is_stateful
from accelerate.data.samplers import (
    BatchSamplerShard,
    ReplayableRandomSampler,
    SamplerShard,
    SeedableRandomSampler,
    draw_seed,
)
from accelerate.data.workers import SeededDataset
from accelerate.process import PartialState
from accelerate.runtime import traits
from accelerate.utils.random import synchronize_rng_states

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
    reading = _reading(dataloader, layout, num_processes, shard_iterable_dataset, dispatch_batches, put_on_device)
    dispatch = reading == plan.DISPATCHED
    if slice_fn_for_dispatch is not None and not dispatch:
        warnings.warn(
            "slice_fn_for_dispatch has no effect, because this loader does not dispatch. Pass dispatch_batches=True.",
            stacklevel=2,
        )
    if split_batches:
        _check_split(dataloader, layout.num_shards)
    if use_seedable_sampler:
        dataloader = _with_seedable_sampler(dataloader, num_processes, data_seed)
    generator = None if dispatch or num_processes == 1 else _shared_generator(dataloader)
    if rng_types is not None and generator is None:
        rng_types = [kind for kind in rng_types if kind != "generator"]  # nothing shuffles
    ReplayableRandomSampler.adopt(get_sampler(dataloader))

    made = plan.make(
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
        "_drop_last": made.drop_last,
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "_base": base,
    }
    device = state.device if device is None else device
    on_xla = not dispatch and put_on_device and traits.of(state.distributed_type).xla
    if dispatch:
        loader = DataLoaderDispatcher(
            base.dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **common
        )
    else:
        own_device = device if put_on_device and not on_xla else None
        loader = DataLoaderShard(base.dataset, own_device, rng_types, generator, **common)
    loader.plan = made
    if state.is_main_process:
        logger.info("Prepared a data loader: %s.", made.summary)
    return xla_wrapper()(loader, device) if on_xla else loader


def plan_of(loader: DataLoader) -> DataPlan:
    """The plan that was made when a loader was prepared.

    Args:
        loader: a loader from `prepare_data_loader`, or a view of one.

    Raises:
        TypeError: the loader was not prepared.
    """
    inner = unwrapped(loader)
    # By the real type, because prepared loaders pass as the loader they wrap.
    if not (issubclass(type(inner), PreparedLoader) and isinstance(inner.plan, DataPlan)):
        raise TypeError(
            f"loader is a {type(inner).__name__} that was not prepared, so nothing was planned for it. Pass what "
            "accelerator.prepare(loader) returned."
        )
    return inner.plan


def _reading(
    dataloader: DataLoader,
    layout: ShardLayout,
    num_processes: int,
    shard_stream: bool,
    dispatch: bool | None,
    put_on_device: bool,
) -> str:
    """How the data is read; warns where processes would read different orders, or the parts of some not at all."""
    dataset, shards, stream = dataloader.dataset, layout.num_shards, is_stream(dataloader)
    divided = stream and (not shard_stream or iterable.is_split_by_node(dataset, shards))
    if dispatch and not put_on_device:
        raise ValueError(
            "dispatch_batches=True needs put_on_device=True: the batches arrive on the device of each process."
        )
    if dispatch or (dispatch is None and stream and put_on_device and not divided):
        if divided:
            warnings.warn(
                "dispatch_batches=True reads on the main process only, but the dataset is split by node: the parts of the "
                "other processes will not be read. Use dispatch_batches=False, or do not split the dataset.",
                stacklevel=3,
            )
        return plan.DISPATCHED
    if not stream:
        return plan.OWN_SHARD
    if min(num_processes, comm.current().world_size) > 1 and iterable.differs_between_ranks(dataset):
        warnings.warn(
            "The dataset was shuffled without a seed, so each process has it in another order and their parts overlap. "
            "Use dataset.shuffle(seed=...) with the same seed on all processes, or dispatch_batches=True.",
            stacklevel=3,
        )
    if divided:
        return plan.SPLIT_ALREADY
    return plan.BY_PIECES if shards > 1 and iterable.can_shard_itself(dataset, shards) else plan.EVERYTHING


def _check_split(dataloader: DataLoader, shards: int) -> None:
    """Refuse a batch size that cannot be divided."""
    sampler = batching_sampler(dataloader)
    size = dataloader.batch_size if dataloader.batch_size is not None else getattr(sampler, "batch_size", None)
    if size is None:
        raise ValueError(
            "split_batches=True needs a batch size, but neither dataloader.batch_size nor that of its batch sampler "
            f"({type(sampler).__name__}) is set. Give the batch sampler a batch_size, or use split_batches=False."
        )
    if size % shards:
        raise ValueError(
            f"split_batches=True divides the batch size of {size} among {shards} processes, which does "
            f"not come out even. Use a batch_size that is a multiple of {shards}, or split_batches=False."
        )


def _with_seedable_sampler(dataloader: DataLoader, num_processes: int, seed: int | None) -> DataLoader:
    """The loader with a sampler that depends on a seed and the epoch, equal on all processes, if it shuffles."""
    sampler, communicator = get_sampler(dataloader), comm.current()
    if not isinstance(sampler, RandomSampler) or (isinstance(sampler, SeedableRandomSampler) and seed is None):
        return dataloader
    if seed is None:
        seed = torch.initial_seed()
        if communicator.world_size > 1 and num_processes > 1:
            [seed] = communicator.broadcast_object_list([seed], 0)
    seedable = SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator() if sampler.generator is None else sampler.generator,
        data_seed=seed,
    )
    dataloader = variant(dataloader)
    if type(dataloader.batch_sampler) is BatchSampler:
        # The caller's loader keeps its own batch sampler, and with it its own order.
        vars(dataloader)["batch_sampler"] = copy.copy(dataloader.batch_sampler)
    adapter.set_sampler(dataloader, seedable)
    return dataloader


def _shared_generator(dataloader: DataLoader) -> torch.Generator | None:
    """The generator that shuffles, if the processes have to share its state; made here if the sampler has none.

    A sampler without a generator draws from torch's default one, which differs between processes as soon as one of them
    has used it more than another; then their shards overlap, and processes that share one shard read different batches.
    """
    owner = dataloader.dataset if is_stream(dataloader) else get_sampler(dataloader)
    if isinstance(owner, SeedableRandomSampler):
        return None
    generator = getattr(owner, "generator", None)
    if generator is None and not is_stream(dataloader) and hasattr(owner, "generator"):
        generator = owner.generator = torch.Generator().manual_seed(draw_seed())
    return generator if isinstance(generator, torch.Generator) else None


def _changes(
    dataloader: DataLoader, layout: ShardLayout, reading: str, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """The parts of the loader that change when it is prepared."""
    dataset, shards, index = dataloader.dataset, layout.num_shards, layout.shard_index
    changes: dict[str, Any] = {}
    if reading == plan.DISPATCHED:
        if iterable.is_datapipe(dataset):
            changes["dataset"] = iterable.PlainStream(
                dataset
            )  # only one process iterates: it would wait for the others
    elif shards > 1 and is_stream(dataloader):
        return _sharded_stream(dataloader, layout, reading, split_batches)
    elif shards > 1:
        outer = batching_sampler(dataloader)
        if dataloader.batch_sampler is None and not isinstance(outer, BatchSampler):
            changes["sampler"] = SamplerShard(outer, shards, index, even_batches)
        else:
            shard = BatchSamplerShard(outer, shards, index, split_batches=split_batches, even_batches=even_batches)
            changes["sampler" if dataloader.batch_sampler is None else "batch_sampler"] = shard
            if split_batches and dataloader.batch_size:
                changes["batch_size"] = dataloader.batch_size // shards
    if dataloader.num_workers and not is_stream(dataloader) and type(dataset) is not SeededDataset:
        changes["dataset"] = SeededDataset(dataset)
    return changes


def _sharded_stream(dataloader: DataLoader, layout: ShardLayout, reading: str, split_batches: bool) -> dict[str, Any]:
    dataset, shards, index, size = dataloader.dataset, layout.num_shards, layout.shard_index, dataloader.batch_size
    changes: dict[str, Any] = {}
    if reading == plan.BY_PIECES:
        changes["dataset"] = dataset.shard(num_shards=shards, index=index)
    elif reading == plan.EVERYTHING:
        part = IterableDatasetShard(dataset, size or 1, dataloader.drop_last, shards, index, split_batches)
        changes["dataset"] = part
        if dataloader.num_workers and adapter.iterates_plainly(dataloader):
            changes["collate_fn"] = CountingCollate(dataloader.collate_fn, part)
    if split_batches:
        batches = BatchSampler(dataloader.sampler, size // shards, dataloader.drop_last)
        changes |= {"batch_size": size // shards, "batch_sampler": batches}
    return changes


# Leaving out the beginning of an epoch -----------------------------------------------------------------------------------


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """Make a loader that leaves out the first batches of an epoch.

    With a map-style dataset the batches are left out by their indices and never loaded; a stream has to be read and
    dropped. Of a prepared loader the result is a view: the two count epochs together, so that after the shortened epoch
    the original goes on with the next one. Every process has to call it with the same number.

    Args:
        dataloader: a prepared loader, or a torch loader.
        num_batches: number of batches to leave out, as a process counts them.

    Returns:
        A loader over the remaining batches; the given one if there is nothing to leave out.

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
        raise ValueError(f"num_batches is {num_batches}; pass the number of batches to leave out, 0 or more.")
    inner = unwrapped(dataloader)
    if inner is not dataloader:
        return xla_wrapper()(skip_first_batches(inner, num_batches), dataloader.device)
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
    if is_stream(dataloader):
        base = variant(dataloader)
        return SkipDataLoader(
            dataloader.dataset, num_batches, use_stateful_dataloader=is_stateful(dataloader), _base=base
        )
    return skipping(dataloader, num_batches)


# XLA devices, where torch_xla's own loader moves the batches in the background ---------------------------------------------


class ReadAhead:
    """A prepared loader that notes, for each batch, what it knew when it read that batch.

    torch_xla reads it in a thread of its own, and hands the batches out later in the same order.

    Args:
        loader: a prepared loader.

    Attributes:
        notes: for each batch that was read and not handed out yet: whether it is the last one, `remainder` and
            `batch_counts` of the loader, and epoch, batches yielded and whether the epoch is at its end.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.notes: deque[tuple[bool, int, tuple[int, ...] | None, tuple[int, int, bool]]] = deque()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        loader, progress = self.loader, self.loader._progress
        for batch in loader:
            position = (progress.epoch, progress.batches, progress.at_end)
            self.notes.append((loader.end_of_dataloader, loader.remainder, loader.batch_counts, position))
            yield batch


@lru_cache(maxsize=1)
def xla_wrapper() -> type:
    """Build the class around torch_xla's `MpDeviceLoader`; called only where torch_xla is installed."""
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    class MpDeviceLoaderWrapper(MpDeviceLoader):
        """Moves batches of a prepared loader to an XLA device ahead of use, and otherwise passes as that loader.

        Args:
            dataloader: a prepared loader that leaves its batches on the CPU.
            device: the XLA device.
        """

        __module__ = "accelerate.data_loader"

        def __init__(self, dataloader: Any, device: torch.device) -> None:
            self._read_ahead = ReadAhead(dataloader)
            super().__init__(self._read_ahead, device)
            self.dataloader = dataloader
            self.device = device

        def __iter__(self) -> Any:
            # Background threads may read several batches ahead: the synchronisation that opens an epoch has to come
            # before them, in step with the other processes.
            prepared = self.dataloader
            gradient_state = prepared.gradient_state
            watch = gradient_state._step_watch
            if watch is not None:
                watch.before_loop(self)
            rng_types, prepared.rng_types = prepared.rng_types, None
            if rng_types is not None:
                synchronize_rng_states(rng_types, prepared.synchronized_generator)
            prepared.read_in_background = True
            gradient_state._add_dataloader(self)
            try:
                for batch in super().__iter__():
                    # What the loader says of itself is about the batch that was read last, several batches ahead.
                    self.end_of_dataloader, self.remainder, self.batch_counts, position = (
                        self._read_ahead.notes.popleft()
                    )
                    prepared._progress.handed_out = position
                    gradient_state._activate(self)
                    yield batch
                    if watch is not None:
                        watch.before_batch(self, at_end=position[2])
            finally:
                gradient_state._remove_dataloader(self)
                prepared._progress.handed_out = None
                prepared.read_in_background = False
                prepared.rng_types = rng_types
                self._read_ahead.notes.clear()

        def __getattr__(self, name: str) -> Any:
            if name == "dataloader":
                raise AttributeError(name)
            return getattr(self.dataloader, name)

    return MpDeviceLoaderWrapper


def unwrapped(dataloader: Any) -> Any:
    """The prepared loader inside torch_xla's, or the loader itself."""
    wrapped = xla_wrapper.cache_info().currsize > 0 and isinstance(dataloader, xla_wrapper())
    return dataloader.dataloader if wrapped else dataloader
