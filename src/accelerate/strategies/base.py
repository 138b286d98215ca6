"""The contract of a strategy: its actions at prepare and in a step. `state_io` has the contract for checkpoints.

A strategy is stateless and resolved at each use; its state is kept on the Accelerator. The methods here implement a single
process, so a new strategy writes only the differences. Call order, in one run:

1. ``check`` on every rank for the objects of ``Accelerator.prepare``, then for each model, followed by ``wrap_model``.
2. For each step ``no_sync`` while gradients accumulate, ``backward``, ``clip_grad_norm`` or ``clip_grad_value``; all
   ranks call them equally often.
3. ``release`` when the Accelerator releases its objects.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.config.handlers import GradScalerKwargs
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.precision import amp, scaling
from accelerate.precision.amp import precision
from accelerate.runtime.run import Run


class Strategy:
    """A strategy's behaviour, by default that of one process.

    A third party derives from it, and registers a `config.strategies.StrategySpec` under the entry-point group ``accelerate.backends``.
    """

    # That of its record; set where it is loaded.
    name: str
    # The Accelerator's method that prepares all objects of one call, where they become one engine.
    prepares_together: ClassVar[str] = ""
    # Whether backward passes talk to other ranks, so that `no_sync` has something to hold back.
    synchronises: ClassVar[bool] = False

    # -- prepare -------------------------------------------------------------------------------------------------

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse (ValueError) objects that this strategy cannot prepare, before anything is changed.

        Collective: call on every rank.
        """

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Whether ``wrap_model`` would put a module around this one for training. Not a collective."""
        return False

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Return the model as it trains under this strategy.

        Collective: call on every rank.
        """
        return model

    def batches(self, accelerator: Run, loader: Any) -> Any:
        """Return the loader that is prepared in the place of one that was given.

        Collective: call on every rank.
        """
        return loader

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model out of its wrappers. Not a collective."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def whole_parameters(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context with the user's model, in which each rank has all parameters unsharded.

        Collective: call on every rank.
        """
        return contextlib.nullcontext(self.unwrap_model(model))

    # -- step ----------------------------------------------------------------------------------------------------

    def backward(self, accelerator: Run, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass of a loss that is already scaled for accumulation.

        Collective: call on every rank.
        """
        scaler = accelerator.scaler
        if scaler is not None:
            scaling.before_backward(scaler)
            loss = scaler.scale(loss)
        loss.backward(**kwargs)

    def no_sync(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes keep gradients on their rank. Not a collective."""
        return contextlib.nullcontext()

    def make_scaler(self, accelerator: Run, handler: GradScalerKwargs | None) -> Any | None:
        """Return the gradient scaler of the precision in force, or None. Not a collective."""
        return amp.make_scaler(accelerator.device.type, precision(accelerator.mixed_precision), handler)

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip gradients to a total norm, and return the norm that they had.

        Collective: call on every rank.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, accelerator: Run, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip each gradient element to a range.

        Collective: call on every rank.
        """
        nn.utils.clip_grad_value_(parameters, clip_value)

    # -- end -----------------------------------------------------------------------------------------------------

    def release(self, accelerator: Run) -> None:
        """Release the strategy's data of the Accelerator's objects.

        Collective: call on every rank.
        """


class SingleProcess(Strategy):
    """The behaviour of one process, which is the contract's default: nothing to synchronise."""
