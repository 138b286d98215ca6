"""The method of the Accelerator that enters the context of a batch."""

import contextlib
from typing import Any

import torch


def maybe_context_parallel(
    accelerator: Any,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which buffers are sharded along their sequence, if context parallelism is on.

    Collective: call on every rank.

    Args:
        buffers: Tensors to shard in place.
        buffer_seq_dims: The sequence dimension of each.
        no_restore_buffers: Those that stay sharded afterwards.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> ids = torch.arange(8).unsqueeze(0)
        >>> with Accelerator(cpu=True).maybe_context_parallel(buffers=[ids], buffer_seq_dims=[1]):
        ...     ids.shape[1]  # a part of it where context parallelism is on
        8
    """
    context: Any = accelerator._cp_context
    if context is None:
        return contextlib.nullcontext()
    entered: contextlib.AbstractContextManager[None] = context(
        buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
    )
    return entered
