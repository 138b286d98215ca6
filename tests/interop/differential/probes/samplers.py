"""Batch samplers and streams that are divided, seeded or shortened."""

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
)

from accelerate.data_loader import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from interop.differential.core import probe
from interop.differential.probes.loaders import Stream, attempt

LENGTHS = [0, 1, 2, 5, 8, 11]


@probe(
    "data_loader:BatchSamplerShard",
    length=LENGTHS,
    batch=[1, 2, 3],
    drop=[False, True],
    world=[1, 2, 3],
    split=[False, True],
    even=[True, False],
)
def batch_sampler_shard(
    length: int, batch: int, drop: bool, world: int, split: bool, even: bool
) -> Iterator[tuple[str, Any]]:
    """What each of some processes gets."""
    inner = BatchSampler(range(length), batch, drop)
    shards = [BatchSamplerShard(inner, world, rank, split_batches=split, even_batches=even) for rank in range(world)]
    yield "batches", [list(shard) for shard in shards]
    yield "lengths", [len(shard) for shard in shards]
    yield "totals", [shard.total_length for shard in shards]


SAMPLERS = {
    "sequential": lambda: BatchSampler(SequentialSampler(range(7)), 2, False),
    "lists": lambda: [[0, 1], [2, 3], [4]],
    "uneven": lambda: [[0], [1, 2, 3], [4, 5]],
    "empty": list,
    "tuple": lambda: ((0, 1), (2, 3)),
    "strings": lambda: [["a", "b"], ["c"]],
    "random": lambda: BatchSampler(RandomSampler(range(7), generator=torch.Generator().manual_seed(1)), 3, False),
}


def sized(items: Any, size: Any, drop: Any) -> Any:
    """A batch sampler of one's own, with or without the usual attributes."""
    if isinstance(items, BatchSampler):
        return items

    class Own(list):
        pass

    own = Own(items)
    if size != "none":
        own.batch_size = size
    if drop != "none":
        own.drop_last = drop
    return own


@probe(
    "data_loader:BatchSamplerShard",
    sampler=list(SAMPLERS),
    size=["none", None, 1, 2, 3],
    drop=["none", False, True],
    split=[False, True],
    even=[True, False],
)
def batch_sampler_kinds(sampler: str, size: Any, drop: Any, split: bool, even: bool) -> Any:
    inner = [sized(SAMPLERS[sampler](), size, drop) for _ in range(2)]
    shards = [BatchSamplerShard(inner[rank], 2, rank, split_batches=split, even_batches=even) for rank in range(2)]
    return [attempt(list, shard) for shard in shards]


@probe("data_loader:BatchSamplerShard", world=[0, -1, 1, 2, None, 2.0], rank=[0, 1, 2, -1, None])
def batch_sampler_ranks(world: Any, rank: Any) -> Any:
    return list(BatchSamplerShard(BatchSampler(range(7), 2, False), world, rank))


@probe(
    "data_loader:BatchSamplerShard",
    name=["num_processes", "process_index", "split_batches", "even_batches"],
    value=[0, 1, 3, True, False],
)
def batch_sampler_changed(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes that libraries set on a shard."""
    shard = BatchSamplerShard(BatchSampler(range(9), 2, False), 2, 1)
    setattr(shard, name, value)
    yield "read", getattr(shard, name)
    yield "batches", attempt(list, shard)
    yield "length", attempt(len, shard)
    yield "attributes", (shard.batch_size, shard.drop_last, type(shard.batch_sampler).__name__, shard.total_length)
    yield "copy", attempt(lambda: list(pickle.loads(pickle.dumps(shard))))


@probe(
    "data_loader:IterableDatasetShard",
    length=LENGTHS,
    batch=[1, 2, 3, 4],
    drop=[False, True],
    world=[1, 2, 3],
    split=[False, True],
)
def iterable_shard(length: int, batch: int, drop: bool, world: int, split: bool) -> Iterator[tuple[str, Any]]:
    def build(sized: bool) -> Any:
        return [IterableDatasetShard(Stream(length, sized), batch, drop, world, rank, split) for rank in range(world)]

    if split and batch % world:
        yield "refused", attempt(build, False)
        return
    yield "samples", [list(shard) for shard in build(False)]
    yield "lengths", [attempt(len, shard) for shard in build(True)]
    yield "unknown", attempt(len, build(False)[0])


@probe("data_loader:IterableDatasetShard", epoch=[0, 1, 7, -1, None, "2"], kind=["stream", "list", "generator"])
def iterable_epoch(epoch: Any, kind: str) -> Iterator[tuple[str, Any]]:
    source = {"stream": lambda: Stream(5), "list": lambda: [1, 2, 3], "generator": lambda: (i for i in range(3))}[
        kind
    ]()
    shard = IterableDatasetShard(source, 2, False, 2, 1)
    yield "set", attempt(shard.set_epoch, epoch)
    yield "epoch", attempt(getattr, shard, "epoch")
    yield "samples", attempt(list, shard)
    yield (
        "attributes",
        (shard.batch_size, shard.drop_last, shard.num_processes, shard.process_index, shard.split_batches),
    )


@probe(
    "data_loader:SeedableRandomSampler",
    given=[
        {},
        {"num_samples": 3},
        {"replacement": True},
        {"replacement": True, "num_samples": 9},
        {"data_seed": 5},
        {"data_seed": 0},
    ],
    generator=[None, "seeded", "fresh"],
    epoch=[None, 0, 1, 3],
)
def seedable(given: dict[str, Any], generator: Any, epoch: Any) -> Iterator[tuple[str, Any]]:
    if generator is not None:
        given["generator"] = torch.Generator().manual_seed(3) if generator == "seeded" else torch.Generator()
    sampler = SeedableRandomSampler(range(6), **given)
    if epoch is not None:
        yield "set", sampler.set_epoch(epoch)
    yield "first", list(sampler)
    yield "second", list(sampler)
    yield "read", (sampler.epoch, sampler.initial_seed if generator or "data_seed" in given else 0, len(sampler))
    restored = pickle.loads(pickle.dumps(sampler))
    yield "restored", (type(restored).__module__, restored.epoch, list(restored))
    sampler.epoch = 2
    yield "assigned", list(sampler)


@probe("data_loader:SkipBatchSampler", length=LENGTHS, batch=[1, 2, 3], drop=[False, True], skip=[-1, 0, 1, 2, 5, 100])
def skip_batch_sampler(length: int, batch: int, drop: bool, skip: int) -> Iterator[tuple[str, Any]]:
    sampler = SkipBatchSampler(BatchSampler(range(length), batch, drop), skip)
    yield "batches", attempt(list, sampler)
    yield "length", attempt(len, sampler)
    yield "total", attempt(lambda: sampler.total_length)
    yield "skip", sampler.skip_batches


@probe("data_loader:SkipBatchSampler", skip=[None, "1", 1.0, 1.5, True])
def skip_odd(skip: Any) -> Any:
    return list(SkipBatchSampler(BatchSampler(range(7), 2, False), skip))
