"""XLA devices: one process per core, gradients reduced when the optimizer steps."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.backends.base import Backend

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


class XLA(Backend):
    """torch_xla's data parallelism: replicas without a wrapper, one all-reduce before each step."""

    name = "xla"

    def clip_grad_norm(
        self, accelerator: "Accelerator", parameters: Any, max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Reduce the gradients first, so that the norm is that of the global batch."""
        for optimizer in accelerator._optimizers:
            optimizer._reduce_gradients()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def make_scaler(self, accelerator: "Accelerator", handler: Any) -> Any | None:
        """Return torch_xla's scaler, which knows that steps are traced."""
        if accelerator.mixed_precision != "fp16":
            return None
        from torch_xla.amp import GradScaler

        return GradScaler(**(handler.to_kwargs() if handler is not None else {}))
