"""Messages between the ranks that share a sequence, with the gradients' way back: gather, exchange, pass on in a ring."""

from typing import Any

import torch
from torch import Tensor, distributed


class _GatherSequence(torch.autograd.Function):
    """All shards of a sequence on every rank; its gradient is the sum of what all ranks computed for a shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        shard = shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(size)]
        distributed.all_gather(shards, shard, group=group)
        return torch.cat(shards, dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # An exchange and a sum in the order of the ranks, since gloo has no reduce-scatter in every version.
        parts = torch.stack(gradient.chunk(ctx.size, dim=-2)).contiguous()
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=ctx.group)
        return received.sum(dim=0), None, None


class _Exchange(torch.autograd.Function):
    """Every rank gives rank i its i-th part along one dimension, and joins what it receives along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: int, join: int, group: Any, size: int) -> Tensor:
        ctx.settings = (split, join, group, size)
        return _exchanged(tensor, split, join, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        split, join, group, size = ctx.settings
        return _exchanged(gradient, join, split, group, size), None, None, None, None


def _exchanged(tensor: Tensor, split: int, join: int, group: Any, size: int) -> Tensor:
    parts = torch.stack(tensor.chunk(size, dim=split)).contiguous()
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(0), dim=join)


def gather_sequence(shard: Tensor, group: Any, size: int) -> Tensor:
    """Join the shards of a sequence on every rank, differentiably. All ranks of the group call it.

    Args:
        shard: this rank's part, [..., length / size, width], of the same shape on every rank.
        group: the process group.
        size: its number of ranks.

    Returns:
        [..., length, width], in the order of the ranks.
    """
    return _GatherSequence.apply(shard, group, size)


def exchange(tensor: Tensor, split: int, join: int, group: Any, size: int) -> Tensor:
    """Swap which dimension is distributed, differentiably. All ranks of the group call it.

    Args:
        tensor: of any type; `split` must be divisible by the number of ranks.
        split: the dimension that is whole here and distributed in the result.
        join: the dimension that is distributed here and whole in the result.
        group: the process group.
        size: its number of ranks.

    Returns:
        As `tensor`, with dimension `split` a `size`-th of it, and `join` `size` times it.
    """
    return _Exchange.apply(tensor, split, join, group, size)


def pass_on(tensor: Tensor, group: Any, rank: int, size: int) -> Tensor:
    """Send a tensor to the next rank of a ring, and return the one of the rank before. All ranks of the group call it.

    Args:
        tensor: of the same shape and type on every rank.
        group: the process group.
        rank: this rank's place in it.
        size: its number of ranks.
    """
    received = torch.empty_like(tensor)
    after, before = (distributed.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    operations = [
        distributed.P2POp(distributed.isend, tensor.contiguous(), after, group=group),
        distributed.P2POp(distributed.irecv, received, before, group=group),
    ]
    for request in distributed.batch_isend_irecv(operations):
        request.wait()
    return received
