"""Batch samplers and streams that are divided, seeded or shortened."""

import pickle

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from interop.differential.core import attempt, probe

SAMPLERS = {
    "sequential": lambda: BatchSampler(SequentialSampler(range(7)), 2, False), "lists": lambda: [[0, 1], [2, 3], [4]],
    "uneven": lambda: [[0], [1, 2, 3], [4, 5]], "empty": list, "tuple": lambda: ((0, 1), (2, 3)),
    "strings": lambda: [["a", "b"], ["c"]],
    "random": lambda: BatchSampler(RandomSampler(range(7), generator=torch.Generator().manual_seed(1)), 3, False),
}  # fmt: skip


def sized(items, size, drop):
    """A batch sampler of your own, with or without the usual attributes."""
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
    "data_loader:BatchSamplerShard", sampler=list(SAMPLERS), size=["none", None, 1, 2, 3], drop=["none", False, True],
    split=[False, True], even=[True, False],
)  # fmt: skip
def batch_sampler_kinds(sampler, size, drop, split, even):
    inner = [sized(SAMPLERS[sampler](), size, drop) for _ in range(2)]
    shards = [BatchSamplerShard(inner[rank], 2, rank, split_batches=split, even_batches=even) for rank in range(2)]
    return [attempt(list, shard) for shard in shards]


@probe("data_loader:BatchSamplerShard", world=[0, -1, 1, 2, None, 2.0], rank=[0, 1, 2, -1, None])
def batch_sampler_ranks(world, rank):
    return list(BatchSamplerShard(BatchSampler(range(7), 2, False), world, rank))


@probe(
    "data_loader:SeedableRandomSampler",
    given=[
        {}, {"num_samples": 3}, {"replacement": True}, {"replacement": True, "num_samples": 9}, {"data_seed": 5},
        {"data_seed": 0},
    ], generator=[None, "seeded", "fresh"], epoch=[None, 0, 1, 3],
)  # fmt: skip
def seedable(given, generator, epoch):
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
