"""The numbers of a data plan, counted from the way in which a loader is read."""

from __future__ import annotations

from torch.utils.data import BatchSampler

from accelerate.data import adapter
from accelerate.data.adapter import is_stream, known_length
from accelerate.data.reading import AlreadySplit, ByPieces, Dispatched, OwnShard, Reading, ReadsEverything
from accelerate.data.samplers import Rounds, has_tensor_order
from accelerate.extensions.data_plan.plan import DataPlan, ShardPlan

# Samples, duplicates and batches of a shard, None if they are not known.
Counts = tuple[int | None, int | None, int | None]
_UNKNOWN: Counts = (None, None, None)


def plan(reading: Reading) -> DataPlan:
    """Return who reads what."""
    loader, shards = reading.loader, reading.shards
    equal_parts = isinstance(reading, AlreadySplit) and reading.equal_parts
    sees_all = equal_parts or not isinstance(reading, AlreadySplit)
    total = len(adapter.get_sampler(loader).dataset) if equal_parts else adapter.samples_per_epoch(loader)
    size = _batch_size(reading)
    counts = [_UNKNOWN] * shards
    if total is not None and size is not None and reading.batches_plainly():
        counts = _counts(reading, size)
    ranks: list[list[int]] = [[] for _ in counts]
    for rank, layout in enumerate(reading.layouts):
        ranks[layout.shard_index].append(rank)
    read = _read_share(reading)
    samples, duplicates, _ = (None if None in column else sum(column) for column in zip(*counts, strict=True))
    return DataPlan(
        kind="stream" if is_stream(loader) else "map-style",
        reading=reading.name,
        process_index=reading.process_index,
        shard_index=reading.shard_index,
        shards=tuple(ShardPlan(shard, tuple(ranks[shard]), *counts[shard], read[shard]) for shard in range(shards)),
        parts=shards if isinstance(reading, AlreadySplit) else 1,
        dataset_length=known_length(adapter.dataset_length, loader.dataset) if sees_all else None,
        samples=samples,
        duplicates=duplicates,
        dropped=None if samples is None or total is None else total - samples,
        batch_size=size,
        total_batch_size=None if size is None else size * shards,
        workers=loader.num_workers,
        sampler=adapter.sampler_kind(loader),
        drop_last=reading.drop_last,
        ends_by_vote=reading.ends_by_vote,
        walked=shards > 1 and isinstance(reading, OwnShard) and _is_walked(reading),
    )


def _batch_size(reading: Reading) -> int | None:
    """Return the batch size of a process; None for batches of any size."""
    loader, size = reading.loader, getattr(reading.batching, "batch_size", None)
    if loader.batch_sampler is not None:
        size = loader.batch_size if size is None else size
    elif isinstance(reading, Dispatched):
        size = None
    elif not isinstance(reading.batching, BatchSampler):  # not batched: the sampler gives single indices
        size = 1
    return size // reading.shards if size is not None and reading.split_batches else size


def _counts(reading: Reading, size: int) -> list[Counts]:
    """Return samples, duplicates and batches of each shard in an epoch of batches of so many samples."""
    shards = reading.shards
    if isinstance(reading, AlreadySplit):
        [(taken, _, batches)] = _rounds(reading, size, 1, "nothing")
        if reading.equal_parts:
            # The last shards of a `DistributedSampler` end with a repeated sample.
            repeated = reading.repeated if taken == len(adapter.get_sampler(reading.loader)) else 0
            fills = [int(shard >= shards - repeated) for shard in range(shards)]
            return [(taken - fill, fill, batches) for fill in fills]
        counts = [_UNKNOWN] * shards
        counts[reading.shard_index] = (taken, 0, batches)
        return counts
    if isinstance(reading, Dispatched):
        return _rounds(reading, size, shards, "round")
    if isinstance(reading, OwnShard):
        return _rounds(reading, size, shards, "batches" if reading.even_batches else "nothing")
    # The last round of a stream is always completed. How many samples pieces have is not known.
    return [_UNKNOWN] * shards if isinstance(reading, ByPieces) else _rounds(reading, size, shards, "batches")


def _rounds(reading: Reading, size: int, shards: int, fill: str) -> list[tuple[int, int, int]]:
    """Count the samples of each shard when the shards take batches of `size` samples in turn.

    Args:
        reading: the way of reading.
        size: samples of a batch.
        shards: how many shards share the samples that the sampler draws.
        fill: the treatment of an incomplete last round that is not dropped: "batches" completes it to full batches, "round"
            only until all shards hold equally many, "nothing" leaves shards with a smaller batch, or none.
    """
    rounds, rest = divmod(adapter.samples_per_epoch(reading.loader) or 0, size * shards)
    if reading.drop_last or not rest:
        return [(rounds * size, 0, rounds)] * shards
    fill = "nothing" if shards == 1 else fill
    width = -(-rest // shards) if fill == "round" else size
    result = []
    for real in Rounds(width, shards).real(rest):
        filled = width if fill != "nothing" else real
        result.append((rounds * size + real, filled - real, rounds + (filled > 0)))
    return result


def _read_share(reading: Reading) -> list[float | None]:
    """Return the part of the data that the processes of each shard read, from 0.0 to 1.0; None if it is not known."""
    shards = reading.shards
    if shards == 1 or isinstance(reading, ReadsEverything):
        return [1.0] * shards
    if isinstance(reading, Dispatched):
        return [1.0] + [0.0] * (shards - 1)
    if isinstance(reading, OwnShard) or (isinstance(reading, AlreadySplit) and reading.equal_parts):
        return [1 / shards] * shards
    return [None] * shards


def _is_walked(reading: Reading) -> bool:
    """Whether each process goes through the batches of all, because the order of a custom sampler is not known beforehand."""
    batching = reading.batching
    return not has_tensor_order(batching.sampler if type(batching) is BatchSampler else batching)
