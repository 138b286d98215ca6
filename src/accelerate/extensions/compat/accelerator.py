"""Methods of the Accelerator that programs call, and nothing in this package."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.modules.unwrap import is_compiled_module


@staticmethod
def trigger_sync_in_backward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context whose backward pass synchronises, although the forward passes ran under ``no_sync``.

    Not a collective.

    Args:
        model: The prepared model.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
        >>> with accelerator.no_sync(model):
        ...     loss = model(torch.ones(1, 1)).sum()
        >>> with accelerator.trigger_sync_in_backward(model):
        ...     accelerator.backward(loss)
    """
    return _synchronising(model)


@contextlib.contextmanager
def _synchronising(model: nn.Module) -> Iterator[None]:
    inner: Any = model._orig_mod if is_compiled_module(model) else model
    if hasattr(inner, "trigger_sync"):  # a model that runs its backward pass itself
        with inner.trigger_sync():
            yield
        return
    if not isinstance(inner, DistributedDataParallel):
        yield
        return
    before = inner.require_backward_grad_sync, inner.require_forward_param_sync
    inner.require_backward_grad_sync = inner.require_forward_param_sync = True
    # The forward passes left the reducer unarmed; an empty list says that every parameter takes part.
    inner.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        inner.require_backward_grad_sync, inner.require_forward_param_sync = before


def set_trigger(accelerator: Any) -> None:
    """Raise a flag on this rank, which ``check_trigger`` shows to every rank.

    Not a collective.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> accelerator.set_trigger()  # on the rank whose loss is no number, say
        >>> accelerator.check_trigger()
        True
    """
    accelerator.flag_tensor = torch.tensor(1, device=accelerator.device)


def check_trigger(accelerator: Any) -> bool:
    """Return whether some rank raised its flag, and lower it.

    Collective: call on every rank.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> accelerator.set_trigger()
        >>> accelerator.check_trigger(), accelerator.check_trigger()
        (True, False)
    """
    flag = torch.tensor(0, device=accelerator.device) if accelerator.flag_tensor is None else accelerator.flag_tensor
    raised: bool = accelerator._communicator.all_reduce(flag.clone(), "sum").item() >= 1
    if raised:
        accelerator.flag_tensor = torch.tensor(0, device=accelerator.device)
    return raised
