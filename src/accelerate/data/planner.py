"""Working out the data plan of a loader, as it is prepared."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accelerate.data import iterable, lengths, plan, xla
from accelerate.data.adapter import is_stateful
from accelerate.data.loader import PreparedLoader
from accelerate.data.plan import DataPlan, ShardLayout, ShardPlan
from accelerate.data.samplers import ReplayableRandomSampler
from accelerate.data.shards import BatchSamplerShard


def make(
    dataloader: DataLoader,
    layout: ShardLayout,
    *,
    reading: str,
    num_processes: int,
    process_index: int,
    mesh: Any | None,
    split_batches: bool,
    even_batches: bool,
) -> DataPlan:
    """Work out who reads what.

    Args:
        dataloader: the loader before it is sharded.
        layout: the shard of this process.
        reading: how it will be read, one of the constants of `accelerate.data.plan`.
        num_processes: number of parts asked for.
        process_index: number of this process among them.
        mesh: the device mesh of the run, or None.
        split_batches: the batch size is that of all shards together.
        even_batches: the last round is completed.

    Returns:
        The plan.
    """
    count, stream = layout.num_shards, lengths.is_stream(dataloader)
    drop_last = drops_last(dataloader)
    total = _drawn(dataloader)
    size = _batch_size(dataloader, reading)
    if size is not None and split_batches:
        size //= count
    known = _numbers(dataloader, layout, reading, total, size, drop_last, split_batches, even_batches)
    pieces = iterable.pieces(dataloader.dataset, count) if reading == plan.BY_PIECES else [None] * count
    ranks = _ranks(layout, num_processes, mesh)
    shards = tuple(
        ShardPlan(shard, ranks[shard], *known[shard], _read(reading, dataloader.dataset, shard, count), pieces[shard])
        for shard in range(count)
    )
    samples, duplicates = _sum(shard.samples for shard in shards), _sum(shard.duplicates for shard in shards)
    return DataPlan(
        kind="stream" if stream else "map-style",
        reading=reading,
        process_index=process_index,
        shard_index=layout.shard_index,
        shards=shards,
        dataset_length=None if reading == plan.SPLIT_ALREADY else _dataset_length(dataloader),
        samples=samples,
        duplicates=duplicates,
        dropped=None if samples is None or total is None else total - samples,
        batch_size=size,
        total_batch_size=None if size is None else size * count,
        workers=dataloader.num_workers,
        sampler=None if stream else _sampler_kind(dataloader),
        drop_last=drop_last,
        pieces=iterable.piece_count(dataloader.dataset) if stream else None,
        uneven=count > 1 and reading in (plan.BY_PIECES, plan.SPLIT_ALREADY),
    )


def plan_of(loader: DataLoader) -> DataPlan:
    """The plan that was made when a loader was prepared.

    Args:
        loader: a loader from `prepare_data_loader`, or a view of one.

    Raises:
        TypeError: the loader was not prepared.
    """
    inner = xla.unwrapped(loader) if xla.is_wrapped(loader) else loader
    # By the real type, because prepared loaders pass as the loader they wrap.
    found = vars(inner).get("plan") if issubclass(type(inner), PreparedLoader) else None
    if not isinstance(found, DataPlan):
        raise TypeError(
            f"loader is a {type(inner).__name__} that was not prepared, so nothing was planned for it. Pass what "
            "accelerator.prepare(loader) returned."
        )
    return found


def drops_last(dataloader: DataLoader) -> bool:
    """Whether the loader, or its own batch sampler, drops an incomplete last batch."""
    return bool(dataloader.drop_last or getattr(lengths.batching_sampler(dataloader), "drop_last", False))


def _numbers(
    dataloader: DataLoader,
    layout: ShardLayout,
    reading: str,
    total: int | None,
    size: int | None,
    drop_last: bool,
    split_batches: bool,
    even_batches: bool,
) -> list[tuple[int | None, int | None, int | None]]:
    """Samples, duplicates and batches of every shard."""
    shards = layout.num_shards
    if reading == plan.SPLIT_ALREADY and shards > 1:
        # The other processes' parts are not in sight.
        unknown: list[tuple[int | None, int | None, int | None]] = [(None, None, None)] * shards
        if total is not None and size is not None and not dataloader.num_workers:
            [unknown[layout.shard_index]] = plan.shards_of(total, size, 1, drop_last=drop_last, fill="nothing")
        return unknown
    if reading == plan.BY_PIECES or (lengths.is_stream(dataloader) and dataloader.num_workers > 1):
        # How many samples a piece holds, and what each worker makes of the stream, is known to the stream alone.
        return [(None, None, None)] * shards
    if total is None or size is None or not _is_plain(dataloader):
        return [(None, None, count) for count in _batches(dataloader, shards, reading, split_batches, even_batches)]
    if shards == 1:
        fill = "nothing"
    elif reading == plan.DISPATCHED:
        fill = "round"
    else:
        # Streams that are divided round by round are always completed.
        fill = "batches" if even_batches or reading == plan.EVERYTHING else "nothing"
    return plan.shards_of(total, size, shards, drop_last=drop_last, fill=fill)


def _batches(
    dataloader: DataLoader, shards: int, reading: str, split_batches: bool, even_batches: bool
) -> list[int | None]:
    """What a custom batch sampler says of its length; the sizes of its batches are its own affair."""
    outer = lengths.batching_sampler(dataloader)
    unknown: list[int | None] = [None] * shards
    if lengths.is_stream(dataloader) or _has_own_iteration(dataloader):
        return unknown
    try:
        if shards == 1 or (reading == plan.DISPATCHED and split_batches):
            return [len(outer)] * shards
        if reading == plan.DISPATCHED:
            return [len(outer) // shards if drops_last(dataloader) else -(-len(outer) // shards)] * shards
        parts = [BatchSamplerShard(outer, shards, index, split_batches, even_batches) for index in range(shards)]
        return [len(part) for part in parts]
    except (TypeError, NotImplementedError):
        return unknown


def _has_own_iteration(dataloader: DataLoader) -> bool:
    return type(dataloader).__iter__ is not DataLoader.__iter__ and not is_stateful(dataloader)


def _is_plain(dataloader: DataLoader) -> bool:
    """Whether batches are cut from the order of the samples as torch's own loader and batch sampler do it."""
    outer = lengths.batching_sampler(dataloader)
    if _has_own_iteration(dataloader):
        return False
    unbatched = dataloader.batch_sampler is None and not isinstance(outer, BatchSampler)
    return lengths.is_stream(dataloader) or type(outer) is BatchSampler or unbatched


def _drawn(dataloader: DataLoader) -> int | None:
    """Samples that an epoch draws."""
    outer = lengths.batching_sampler(dataloader)
    if not lengths.is_stream(dataloader) and dataloader.batch_sampler is not None and not hasattr(outer, "sampler"):
        return None  # a custom batch sampler may draw anything
    return lengths.samples_per_epoch(dataloader)


def _batch_size(dataloader: DataLoader, reading: str) -> int | None:
    outer = lengths.batching_sampler(dataloader)
    if dataloader.batch_sampler is None:
        if reading == plan.DISPATCHED:
            return None  # what the dataset gives is a batch of any size
        # Not batched: the sampler gives single indices, unless it is a batch sampler itself.
        return getattr(outer, "batch_size", None) if isinstance(outer, BatchSampler) else 1
    size = getattr(outer, "batch_size", None)
    return dataloader.batch_size if size is None else size


def _dataset_length(dataloader: DataLoader) -> int | None:
    try:
        return lengths.dataset_length(dataloader.dataset)
    except TypeError:
        return None


def _sampler_kind(dataloader: DataLoader) -> str:
    sampler = lengths.get_sampler(dataloader)
    if isinstance(sampler, ReplayableRandomSampler):
        return "RandomSampler"  # it was made replayable in place, and draws as the plain one does
    return type(lengths.batching_sampler(dataloader) if sampler is None else sampler).__name__


def _ranks(layout: ShardLayout, num_processes: int, mesh: Any | None) -> list[tuple[int, ...]]:
    ranks: list[list[int]] = [[] for _ in range(layout.num_shards)]
    for rank in range(num_processes):
        ranks[ShardLayout.of(num_processes, rank, mesh).shard_index].append(rank)
    return [tuple(those) for those in ranks]


def _read(reading: str, dataset: Any, shard: int, count: int) -> float | None:
    if reading == plan.EVERYTHING or count == 1:
        return 1.0
    if reading == plan.OWN_SHARD:
        return 1 / count
    if reading == plan.DISPATCHED:
        return 1.0 if shard == 0 else 0.0
    if reading == plan.SPLIT_ALREADY:
        return iterable.share_of_split(dataset, shard, count)
    return iterable.share_of_pieces(dataset, shard, count)


def _sum(values: Any) -> int | None:
    values = list(values)
    return None if None in values else sum(values)
