"""Exact attention over a sequence whose queries, keys and values are sharded: the reference path, for CPUs.

torch's own context parallelism needs the flash or memory-efficient kernels of an accelerator. This one computes the same in
plain operations, and its result equals that of attention in one process, forward and backward.
"""

import math
from typing import Any

import torch
from torch import Tensor, distributed

from accelerate.parallel.region import ATTENTION


def _check(query: Tensor, key: Tensor, value: Tensor, dropout: float, gqa: bool) -> None:
    """Refuse what the reference path cannot compute. Every rank sees the same shapes, and refuses together.

    Raises:
        ValueError: dropout, tensors without a dimension of heads, or shapes that do not belong together.
    """
    if dropout > 0:
        raise ValueError(
            f"dropout_p={dropout} in scaled_dot_product_attention: context parallelism on CPU computes exact attention, and "
            "dropout over a sharded sequence would draw other numbers than over a whole one. Set the attention dropout of the "
            "model to 0 (`attention_dropout`, `attn_pdrop` or `attention_probs_dropout_prob` of a transformers config)."
        )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() < 3 or key.dim() != query.dim() or value.dim() != query.dim():
        raise ValueError(
            f"Context parallelism needs query, key and value of [batch, heads, length, width], but they are {shapes}."
        )
    if key.shape[:-1] != value.shape[:-1] or key.shape[-1] != query.shape[-1] or key.shape[:-3] != query.shape[:-3]:
        raise ValueError(f"The shapes of query, key and value do not belong together: {shapes}.")
    heads, shared = query.shape[-3], key.shape[-3]
    if heads != shared and not (gqa and heads % shared == 0):
        raise ValueError(
            f"{heads} query heads and {shared} key heads ({shapes}): "
            + (
                f"{heads} is not a multiple of {shared}."
                if gqa
                else "pass enable_gqa=True to share keys between queries."
            )
        )


def by_gathering(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    region: Any,
) -> Tensor:
    """Attend from this rank's queries to the keys and values of all ranks, collected in one message.

    All ranks of the region's group call it, with shards of the same shape.

    Args:
        query: [batch, heads, length / size, width], this rank's rows.
        key: [batch, key heads, key length / size, width].
        value: [batch, key heads, key length / size, value width].
        dropout: refused unless 0.
        causal: whether a query sees only keys at its place in the whole sequence and before.
        scale: factor of the scores; None means 1 / sqrt(width).
        gqa: whether several query heads may share a key head.
        region: who takes part: `group`, `rank`, `size`.

    Returns:
        [batch, heads, length / size, value width].
    """
    _check(query, key, value, dropout, gqa)
    together = gather_sequence(torch.cat((key, value), dim=-1), region.group, region.size)
    key, value = together.split((key.shape[-1], value.shape[-1]), dim=-1)
    mask = None
    if causal:
        places = torch.arange(query.shape[-2], device=query.device) + region.rank * query.shape[-2]
        mask = places[:, None] >= torch.arange(key.shape[-2], device=query.device)
    shared = query.shape[-3] != key.shape[-3]
    return ATTENTION(query, key, value, attn_mask=mask, scale=scale, enable_gqa=shared)


def by_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    region: Any,
) -> Tensor:
    """Attend from this rank's queries to the keys and values of all ranks, which are passed around in a ring.

    No rank ever holds more than two shards of keys and values. Arguments and result are those of `by_gathering`.

    Source: Ring Attention (arXiv 2310.01889); the running softmax is that of arXiv 1805.02867.
    """
    _check(query, key, value, dropout, gqa)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # As autocast does before attention. Inside, it would cast the running sums, which backward computes without it.
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    shared = key.shape[-3]
    # Query heads that share keys become a dimension of their own, over which keys and values broadcast.
    grouped = query.unflatten(-3, (shared, query.shape[-3] // shared))
    together = torch.cat((key, value), dim=-1)
    with torch.autocast(kind, enabled=False):
        out = _Ring.apply(grouped, together, causal, scale, region.group, region.rank, region.size)
    return out.flatten(-4, -3)


class _Ring(torch.autograd.Function):
    """Attention of [..., key heads, group, rows, width] to keys and values [..., key heads, columns, width + value width]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, together: Tensor, causal: bool, scale: float, group: Any, rank: int, size: int
    ) -> Tensor:
        ctx.settings = (causal, scale, group, rank, size)
        wide = query.float()
        width, moving = query.shape[-1], together
        total = wide.new_zeros((*query.shape[:-1], together.shape[-1] - width))
        weight = wide.new_full(query.shape[:-1], -math.inf)  # logarithm of the sum of exponentials so far
        for step in range(size):
            key, value = moving.float().unsqueeze(-3).split((width, total.shape[-1]), dim=-1)
            scores = _scores(wide, key, causal, scale, rank, (rank - step) % size)
            seen = torch.logsumexp(scores, dim=-1)
            joined = torch.logaddexp(weight, seen)
            total = total * _ratio(weight, joined) + _probabilities(scores, joined) @ value
            weight = joined
            if step < size - 1:
                moving = pass_on(moving, group, rank, size)
        out = total.to(query.dtype)
        ctx.save_for_backward(query, together, total, weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        causal, scale, group, rank, size = ctx.settings
        query, together, total, weight = ctx.saved_tensors
        wide, gradient, width = query.float(), gradient.float(), query.shape[-1]
        spread = (gradient * total).sum(dim=-1, keepdim=True)
        of_query = torch.zeros_like(wide)
        moving, of_moving = together, torch.zeros_like(together, dtype=torch.float32)
        for step in range(size):
            key, value = moving.float().unsqueeze(-3).split((width, total.shape[-1]), dim=-1)
            probabilities = _probabilities(_scores(wide, key, causal, scale, rank, (rank - step) % size), weight)
            of_scores = probabilities * (gradient @ value.mT - spread) * scale
            of_query += of_scores @ key
            of_moving += torch.cat((of_scores.mT @ wide, probabilities.mT @ gradient), dim=-1).sum(dim=-3)
            # The gradient travels with its shard, and is home after the last step.
            of_moving = pass_on(of_moving, group, rank, size)
            if step < size - 1:
                moving = pass_on(moving, group, rank, size)
        return of_query.to(query.dtype), of_moving.to(together.dtype), None, None, None, None, None


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float, rank: int, origin: int) -> Tensor:
    scores = query @ key.mT * scale
    if not causal:
        return scores
    rows = torch.arange(query.shape[-2], device=query.device) + rank * query.shape[-2]
    columns = torch.arange(key.shape[-2], device=query.device) + origin * key.shape[-2]
    return scores.masked_fill(rows[:, None] < columns, -math.inf)


def _probabilities(scores: Tensor, weight: Tensor) -> Tensor:
    # A row that has seen no key yet has the weight -inf: its probabilities are 0, not the difference of infinities.
    return torch.exp(scores - weight.masked_fill(weight == -math.inf, 0.0).unsqueeze(-1))


def _ratio(before: Tensor, after: Tensor) -> Tensor:
    return torch.exp(before - after.masked_fill(after == -math.inf, 0.0)).unsqueeze(-1)


# -- messages between the ranks that share a sequence, with the gradients' way back -----------------------------------


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
