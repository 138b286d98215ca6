"""Labels and losses of a sequence that is shared by ranks: shifted before it is cut, weighted by tokens after."""

from typing import Any

import torch
from torch import Tensor, distributed


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Move every label to the place whose output predicts it, which must happen before a sequence is cut.

    A causal language model predicts token i + 1 at place i. Shifted inside a shard, the last place of every shard would lose its
    label, which is the first token of the next shard.

    Args:
        labels: [..., length], integers, of the whole sequence.
        ignore_index: what the last place gets, which predicts nothing.

    Returns:
        A new tensor of the same shape; pass it to a transformers model as `shift_labels=`.

    Raises:
        ValueError: `labels` has no dimension.

    Example:
        >>> shift_labels(torch.tensor([[5, 6, 7, 8]]))
        tensor([[   6,    7,    8, -100]])
    """
    if labels.dim() == 0:
        raise ValueError("labels is a scalar; it must be [..., length], such as [batch, length].")
    shifted = torch.full_like(labels, ignore_index, memory_format=torch.contiguous_format)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def aggregate_loss(loss: Tensor, num_tokens: Tensor | int, group: Any = None) -> Tensor:
    """Make the mean over one's own tokens the mean over the tokens of all ranks, differentiably. All ranks of the group call it.

    Where shards hold different numbers of tokens that count (padding, prompts that are masked), the plain mean over ranks weighs
    a token of a short shard more. The result has the value of the whole mean on every rank. Its gradient is made for strategies
    that *average* gradients over ranks, as DDP and FSDP do: it is this rank's share times the number of ranks of the group, so
    that the average over them is the gradient of the whole mean. Do not use it where gradients are summed.

    Args:
        loss: scalar, the mean over this rank's tokens; what it is where there is none (nan) does not matter.
        num_tokens: how many tokens that was, an integer or a tensor of one, on any device.
        group: process group, or mesh of one dimension, over which the mean is taken; None means all processes. With the
            sequence's own group, `accelerator.torch_device_mesh["cp"]`, every batch counts the same, as under DDP.

    Returns:
        Scalar of the type of `loss`, equal on all ranks of the group.

    Raises:
        ValueError: `loss` is not a scalar.

    Example:
        >>> with_one_process = aggregate_loss(torch.tensor(2.5), num_tokens=8)
        >>> with_one_process.item()
        2.5

        Under context parallelism, with `shifted = shift_labels(labels)` among the buffers::

            mean = F.cross_entropy(model(ids).flatten(0, 1), shifted.flatten())
            loss = aggregate_loss(mean, (shifted != -100).sum(), group=accelerator.torch_device_mesh["cp"])
    """
    if loss.numel() != 1:
        raise ValueError(
            f"loss has the shape {tuple(loss.shape)}; it must be a scalar, the mean over this rank's tokens."
        )
    group = group.get_group() if hasattr(group, "get_group") else group
    size = distributed.get_world_size(group) if distributed.is_initialized() else 1
    # float32 counts exactly up to 16 million tokens only; MPS has nothing wider.
    precise = torch.float32 if loss.device.type == "mps" else torch.float64
    tokens = torch.as_tensor(num_tokens, device=loss.device).to(precise)
    loss = torch.where(tokens.reshape(loss.shape) > 0, loss, torch.zeros_like(loss))
    sums = torch.stack((loss.detach().to(precise).reshape(()) * tokens.reshape(()), tokens.reshape(())))
    if size > 1:
        distributed.all_reduce(sums, group=group)
    share = loss * (tokens.reshape(loss.shape) * size / sums[1]).to(loss.dtype)
    return share + ((sums[0] / sums[1]).to(loss.dtype) - share).detach()
