"""The context `join_uneven_inputs`: what it does with the strategy and with prepared loaders."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.base._warn import warn_user
from accelerate.comm.in_step import uneven_ends
from accelerate.config.strategies import traits_of
from accelerate.extensions.uneven_inputs import joined
from accelerate.strategies.ddp import DataParallel


def join_uneven_inputs(
    accelerator: Any, joinables: Sequence[Any], even_batches: bool | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which ranks may have different numbers of batches.

    Collective: call on every rank.

    Args:
        joinables: The prepared models (or other ``torch.distributed.algorithms.Joinable``).
        even_batches: Overrides ``even_batches`` of the prepared loaders inside the context.

    Inside, gradients are exchanged after every micro-batch, and ranks that have ended add zeros to the averages, so an
    accumulation step in which some end counts by the share of ranks that close it. ``num_items`` is refused.
    Several models may share a loss: their gradients are exchanged after each backward pass, without ``comm_hook``.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model, loader = accelerator.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(3, 1)))
        >>> with accelerator.join_uneven_inputs([model]):  # on one process there is nothing to join
        ...     for batch in loader:
        ...         accelerator.backward(model(batch).sum())

    Source:
        https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """
    return _joining(accelerator, joinables, even_batches)


@contextlib.contextmanager
def _joining(accelerator: Any, joinables: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
    traits = traits_of(accelerator.distributed_type)
    with contextlib.ExitStack() as contexts:
        if traits.joins_uneven_inputs:
            if not all(getattr(each, "require_backward_grad_sync", True) for each in joinables):
                raise ValueError(
                    "join_uneven_inputs() was called inside LocalSGD or no_sync: at its end one rank's weights would replace those of the "
                    "others. Leave that context before."
                )
            if even_batches is not None:
                contexts.enter_context(_overridden(accelerator._dataloaders, even_batches))
            # Gradients are exchanged after every micro-batch meanwhile, because accumulation steps end at different times.
            contexts.enter_context(uneven_ends())
            contexts.enter_context(_of_strategy(accelerator._strategy, joinables))
        elif traits.distributed:
            kind = accelerator.distributed_type
            warn_user(f"join_uneven_inputs does nothing with {kind}: it needs data parallelism.")
        yield


@contextlib.contextmanager
def _overridden(loaders: Sequence[Any], even_batches: bool) -> Iterator[None]:
    """Override ``even_batches`` of prepared loaders, and warn of those without."""
    samplers: list[tuple[Any, bool]] = []
    for loader in loaders:
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None or not hasattr(sampler, "even_batches"):
            warn_user(
                f"even_batches={even_batches} does not reach a prepared {type(loader).__name__}: only map-style "
                "datasets are sharded by batch. Its batches stay as they are."
            )
        else:
            samplers.append((sampler, sampler.even_batches))
            sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, before in samplers:
            sampler.even_batches = before


def _of_strategy(strategy: Any, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return torch's Join under DDP. A strategy with a method ``join`` has its own context, or refuses."""
    if hasattr(strategy, "join"):
        context: contextlib.AbstractContextManager[Any] = strategy.join(joinables)
        return context
    return joined.join(joinables) if isinstance(strategy, DataParallel) else contextlib.nullcontext()
