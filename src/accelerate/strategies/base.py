"""The contract of a strategy: what a strategy does at prepare, in a step, and for a checkpoint.

A strategy is stateless and resolved at each use; what it needs to remember lives on the Accelerator. The bodies here are
the behaviour of a single process, so a new strategy writes only what differs. Call order, in one run:

1. ``check`` on every rank for what ``Accelerator.prepare`` was given, then for each model, followed by ``wrap_model``.
2. For each step ``no_sync`` while gradients accumulate, ``backward``, ``clip_grad_norm`` or ``clip_grad_value``; all
   ranks call them equally often.
3. For weights alone ``whole_tensors``; for a checkpoint ``model_state``, ``save_model``, ``save_optimizer`` and
   ``checkpointed_schedulers``; for a restore ``load_model`` and ``load_optimizer``. Every rank calls them; who writes is decided in ``checkpoint.save``.
4. ``release`` when the Accelerator lets go of its objects.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.checkpoint import layouts, optimizers, save
from accelerate.checkpoint.state import Entries, Wanted, inner_optimizer, plain_state, tied_again
from accelerate.config.handlers import GradScalerKwargs
from accelerate.modules.unwrap import canonical_names, extract_model_from_parallel
from accelerate.precision import amp, scaling
from accelerate.precision.amp import precision
from accelerate.runtime.run import Run


class Strategy:
    """A strategy's behaviour, by default that of one process.

    A third party derives from it and registers the class under the entry-point group ``accelerate.backends``.
    """

    name: ClassVar[str]
    # Whether backward passes talk to other ranks, so that `no_sync` has something to hold back.
    synchronises: ClassVar[bool] = False
    # Whether a checkpoint has each rank's part of a model, so that the whole is not gathered for `save_model`.
    saves_shards: ClassVar[bool] = False
    # What `whole_tensors` has gathered is nobody else's memory, and stays; tensors that the model has whole are its own.
    gathers_new_memory: ClassVar[bool] = False
    # Which arguments of `save_state` reach `save_model`.
    save_options: ClassVar[tuple[str, ...]] = ()

    # -- prepare -------------------------------------------------------------------------------------------------

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse (ValueError) what this strategy cannot prepare, before anything is changed. All ranks."""

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Whether ``wrap_model`` would put a module around this one for training."""
        return False

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Return the model as it trains under this strategy. All ranks."""
        return model

    def batches(self, accelerator: Run, loader: Any) -> Any:
        """Return the loader that is prepared in the place of one that was given. All ranks."""
        return loader

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model out of its wrappers. Any rank, alone."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def owns_state(self, model: nn.Module) -> bool:
        """Whether hooks of `load_state` do not see this model, nor decide who loads it; those of `save_state` get it as it is."""
        return False

    # -- step ----------------------------------------------------------------------------------------------------

    def backward(self, accelerator: Run, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass of a loss that is already scaled for accumulation."""
        scaler = accelerator.scaler
        if scaler is not None:
            scaling.before_backward(scaler)
            loss = scaler.scale(loss)
        loss.backward(**kwargs)

    def no_sync(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager:
        """Return a context in which backward passes keep gradients on their rank."""
        return contextlib.nullcontext()

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager:
        """Return a context in which ranks may run out of batches at different steps."""
        return contextlib.nullcontext()

    def make_scaler(self, accelerator: Run, handler: GradScalerKwargs | None) -> Any | None:
        """Return the gradient scaler of the precision in force, or None."""
        return amp.make_scaler(accelerator.device.type, precision(accelerator.mixed_precision), handler)

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip gradients to a total norm, and return the norm that they had. All ranks."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, accelerator: Run, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip each gradient element to a range. All ranks."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    # -- checkpoint ----------------------------------------------------------------------------------------------

    def whole_tensors(self, accelerator: Run, model: nn.Module, wanted: Wanted = bool) -> Entries:
        """Yield the wanted entries of the user's model's state dict, each whole, of tied ones the first. All ranks, in step.

        A value is to be read before the next one is asked for: it may be the model's memory, or freed then.
        """
        state, again = self.unwrap_model(model, keep_torch_compile=False).state_dict(), tied_again(model)
        for name, value in zip(canonical_names(state), state.values(), strict=True):
            if wanted(name) and name not in again:
                yield name, value

    def whole_parameters(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context that gives the user's model, whose parameters each rank has whole in it. All ranks."""
        return contextlib.nullcontext(self.unwrap_model(model))

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the full state dict, with `unwrap` under the names of the user's model. All ranks."""
        return (self.unwrap_model(model, keep_torch_compile=False) if unwrap else model).state_dict()

    def save_model(self, accelerator: Run, state: dict[str, Any], folder: str, index: int, **options: Any) -> None:
        """Write a state from `model_state` (empty with `saves_shards`) into a `SavePlan`. All ranks.

        `options` are `safe_serialization`, `save_on_each_node`, and those in `save_options` that the user gave.
        """
        save.write_model(state, folder, index, **options)

    def load_model(self, accelerator: Run, model: nn.Module, folder: str, index: int, **options: Any) -> Any:
        """Read a model's state from a checkpoint folder. All ranks.

        Returns a state dict for the user's module; or a pair of what takes a state in its place, with ``parameters``,
        ``buffers`` and ``load_state_dict``, and the state; or None where the weights are loaded already.
        """
        return layouts.read_full_model(model, folder, index, **options)

    def save_optimizer(self, accelerator: Run, optimizer: Any, folder: str, index: int, **options: Any) -> None:
        """Write an optimizer's state into a checkpoint folder. All ranks."""
        save.write_optimizer(plain_state(inner_optimizer(optimizer)), folder, index, **options)

    def load_optimizer(self, accelerator: Run, optimizer: Any, folder: str, index: int, **options: Any) -> Any:
        """Read an optimizer's state from a checkpoint folder. All ranks."""
        return optimizers.read_full_optimizer(optimizer, accelerator._models, folder, index, **options)

    def checkpointed_schedulers(self, accelerator: Run) -> list[Any]:
        """Return the schedulers whose state is saved with a checkpoint."""
        return list(accelerator._schedulers)

    # -- end -----------------------------------------------------------------------------------------------------

    def release(self, accelerator: Run) -> None:
        """Let go of what the strategy holds for the Accelerator's objects. All ranks."""


class SingleProcess(Strategy):
    """The behaviour of one process, which is the contract's default: nothing to synchronise."""

    name = "single"
