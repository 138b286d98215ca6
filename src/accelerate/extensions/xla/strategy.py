"""torch_xla's data parallelism: gradients are reduced before a step, and the traced graph ends after it."""

from typing import Any

import torch

from accelerate.base.environment import parse_flag_from_env
from accelerate.config.strategies import traits_of
from accelerate.devices.table import DEVICES
from accelerate.extension import Extension
from accelerate.extensions.xla import DOWNCAST_FLAG
from accelerate.extensions.xla.downcast import apply_downcast
from accelerate.runtime.run import Run
from accelerate.strategies.base import Strategy


def reduce_gradients(optimizer: Any) -> None:
    """Average the gradients of a prepared optimizer over all processes. Collective: call on every rank."""
    import torch_xla.core.xla_model as xm

    gradients = xm._fetch_gradients(optimizer.optimizer)
    xm.all_reduce("sum", gradients, scale=1.0 / optimizer.accelerator_state.num_processes)
    optimizer.gradient_state.is_xla_gradients_synced = True


def _reduce(accelerator: Run) -> None:
    if not accelerator.gradient_state.is_xla_gradients_synced:
        for optimizer in accelerator._optimizers:
            reduce_gradients(optimizer)


class ReduceBeforeStep(Extension):
    """Reduces the gradients of each optimizer before its step, unless clipping has, and runs the traced operations after it."""

    order = 0  # The hooks of others see reduced gradients, and the weights after the step.

    @classmethod
    def attach(cls, run: Any) -> "ReduceBeforeStep | None":
        """Let torch_xla store numbers in fewer bits if the environment asks for it, on TPUs."""
        if parse_flag_from_env(DOWNCAST_FLAG):
            apply_downcast(run.device.type, run.mixed_precision)
        return cls(run) if traits_of(run.distributed_type).traced else None

    def step_begins(self, optimizer: Any) -> None:
        """Reduce the gradients, unless clipping has done so."""
        if not optimizer.gradient_state.is_xla_gradients_synced:
            reduce_gradients(optimizer)

    def step_ends(self, optimizer: Any) -> None:
        """Run the traced operations."""
        optimizer.gradient_state.is_xla_gradients_synced = False
        # torch_xla 2.9 gives wrong values where tensors are read one by one while updates in place are still pending.
        DEVICES["xla"].namespace().mark_step()


class XLA(Strategy):
    """torch_xla's data parallelism: replicas without a wrapper, one all-reduce before each step."""

    def clip_grad_norm(self, accelerator: Run, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Reduce the gradients first, so that the norm is that of the global batch."""
        _reduce(accelerator)
        return super().clip_grad_norm(accelerator, parameters, max_norm, norm_type)

    def clip_grad_value(self, accelerator: Run, parameters: Any, clip_value: float) -> None:
        """Reduce the gradients first, so that the elements are those of the global batch."""
        _reduce(accelerator)
        super().clip_grad_value(accelerator, parameters, clip_value)

    def make_scaler(self, accelerator: Run, handler: Any) -> Any | None:
        """Return torch_xla's scaler, which knows that steps are traced."""
        if accelerator.mixed_precision != "fp16":
            return None
        from torch_xla.amp import GradScaler

        return GradScaler(**(handler.to_kwargs() if handler is not None else {}))
