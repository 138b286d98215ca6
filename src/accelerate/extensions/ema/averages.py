"""A moving average of weights in the optimizer's state, sharded like it, and saved, loaded and resharded with it."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accelerate.comm.in_step import ends_are_uneven
from accelerate.config.strategies import traits_of
from accelerate.extension import Extension
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import local_part

# Its name in the state of each parameter.
KEY = "ema"


class Ema(Extension):
    """An exponential moving average of a model's weights: after each optimizer step ``decay * average + (1 - decay) * weight``.

    It begins with the weights after the first step, like torch's `AveragedModel`. A skipped step does not count. Each rank
    averages its own part, without communication. The average is in the optimizer's state as `"ema"`, so a checkpoint has it,
    also for another number of ranks or strategy. A run that loads one calls `Accelerator.ema` again.

    Attributes:
        decay: the share of the average that a step keeps.
        is_applied: whether the model has the averages for its weights now.

    Source:
        https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """

    def __init__(self, run: Any, model: nn.Module, optimizers: list[torch.optim.Optimizer], decay: float) -> None:
        super().__init__(run)
        self.decay, self.is_applied = decay, False
        self._model, self._optimizers, self._average = model, optimizers, get_ema_multi_avg_fn(decay)
        self._averaged = {id(parameter) for parameter in model.parameters()}
        self._hooks = [optimizer.register_step_post_hook(self._update) for optimizer in optimizers]

    def close(self) -> None:
        """Stop averaging; ``free_memory`` calls it. Not a collective."""
        for hook in self._hooks:
            hook.remove()
        self.run.extensions.remove(self)

    def released(self) -> None:
        """Stop averaging. Not a collective."""
        self.close()

    def saving(self, plan: Any) -> None:
        """Refuse a checkpoint in which weights and averages would have each other's place.

        Collective: call on every rank.
        """
        self._refuse_applied("save_state")

    def loading(self, folder: str) -> None:
        """Refuse a load that would give the model averages for weights.

        Collective: call on every rank.
        """
        self._refuse_applied("load_state")

    def _refuse_applied(self, call: str) -> None:
        if self.is_applied:
            raise ValueError(
                f"{call}() was called inside ema.applied(), where the model has averages for weights. Leave it before."
            )

    def has(self, parameters: Collection[int]) -> bool:
        """Return whether it is the average of one of some parameters, which are given by identity.

        Not a collective.
        """
        return not self._averaged.isdisjoint(parameters)

    def _pairs(
        self, optimizer: torch.optim.Optimizer, begins: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's part of each average and of its weight; after a step, missing averages begin with the weights."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._averaged:
                    continue
                # Not before its first step: optimizers begin where they find no state.
                if begins and parameter.grad is not None and KEY not in optimizer.state[parameter]:
                    optimizer.state[parameter][KEY] = parameter.detach().clone()
                if KEY in optimizer.state.get(parameter, ()):
                    yield local_part(optimizer.state[parameter][KEY]), local_part(parameter.detach())

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.is_applied:
            raise RuntimeError(
                "optimizer.step() was called inside ema.applied(), where the model has averages for weights."
            )
        if ends_are_uneven() or not getattr(self._model, "require_backward_grad_sync", True):
            raise RuntimeError(
                "optimizer.step() was called inside LocalSGD, no_sync or join_uneven_inputs, with an average by ema(): ranks step with different "
                "weights or different numbers of times there, so their averages would differ for good. Step outside of it, or call ema.close() before."
            )
        if getattr(optimizer, "found_inf", None):  # a fused step looks at it itself, and so does not skip this
            return
        if pairs := list(self._pairs(optimizer, begins=True)):
            averages, weights = map(list, zip(*pairs, strict=True))
            self._average(averages, weights, None)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages for its weights inside, to evaluate or to save it.

        Collective: call on every rank.

        Example:
            >>> from accelerate import Accelerator
            >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1, bias=False)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            >>> ema = accelerator.ema(model, decay=0.5)
            >>> _ = torch.nn.init.ones_(model.weight)
            >>> for _ in range(2):
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> with ema.applied():
            ...     model.weight.item()
            -0.5
            >>> model.weight.item()
            -1.0
        """
        if self.is_applied:
            raise RuntimeError(
                "ema.applied() was entered inside itself, which would give the model its weights back. Leave it before."
            )
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        _reshard(self._model)
        for optimizer in self._optimizers:
            for average, weight in self._pairs(optimizer):
                former = weight.clone()
                weight.copy_(average), average.copy_(former)
        self.is_applied = not self.is_applied


def _reshard(model: nn.Module) -> None:
    """Free weights that FSDP2 has gathered before: they hide the shards, and the next forward would use them."""
    for unit in torch_private.sharded_units(model):
        unit.reshard()  # type: ignore[operator]  # an FSDPModule


def ema(accelerator: Any, model: nn.Module, decay: float = 0.999) -> Ema:
    """Keep a moving average of a model's weights from now on, sharded if the weights are.

    Collective: call on every rank.

    Args:
        model: A prepared model, whose optimizer is prepared too.
        decay: The share of the average that a step keeps: ``decay * average + (1 - decay) * weight``.

    Returns:
        The average; ``with average.applied():`` the model has it for its weights.

    Raises:
        ValueError: The model or its optimizer is not prepared, it has an average already, its weights are of half precision, or
            the strategy has flat parts (FSDP1, DeepSpeed).

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.ema(model, decay=0.99).decay
        0.99
    """
    kind, traits = accelerator.distributed_type, traits_of(accelerator.distributed_type)
    if traits.own_groups or (
        traits.sharded and not accelerator.is_fsdp2 and accelerator.state.fsdp_plugin is not None
    ):
        raise ValueError(
            f"ema() is not possible with {kind}, whose weights are in flat parts. Use FSDP with fsdp_version=2."
        )
    if accelerator.has_lomo_optimizer:
        raise ValueError("ema() is not possible with LOMO, whose optimizers step in the backward pass.")
    if not 0 < decay < 1:
        raise ValueError(f"decay is {decay}; it must be between 0 and 1, such as 0.999.")
    _reshard(model)
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    optimizers = (outer.optimizer for outer in accelerator._optimizers)
    trained = {
        inner: [p for group in inner.param_groups for p in group["params"] if id(p) in parameters]
        for inner in optimizers
    }
    if not any(trained.values()):
        raise ValueError("ema() got a model without parameters in a prepared optimizer. Prepare both first.")
    if half := [str(p.dtype) for its in trained.values() for p in its if p.dtype in (torch.float16, torch.bfloat16)]:
        raise ValueError(
            f"ema() got weights in {half[0]}, too coarse for an average. Load them in float32, with mixed_precision."
        )
    if any(average.has(parameters) for average in accelerator.extensions.of_kind(Ema)):
        raise ValueError("ema() was called before for a part of this model. Keep the object that it returned.")
    return accelerator.extensions.add(Ema(accelerator, model, [inner for inner, its in trained.items() if its], decay))
