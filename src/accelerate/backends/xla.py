"""XLA devices: one process per core, gradients reduced when the optimizer steps."""

from typing import Any

import torch
from torch import nn

from accelerate.backends.base import Backend
from accelerate.runtime.run import Run


class XLA(Backend):
    """torch_xla's data parallelism: replicas without a wrapper, one all-reduce before each step."""

    name = "xla"

    def clip_grad_norm(self, accelerator: Run, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Reduce the gradients first, so that the norm is that of the global batch."""
        for optimizer in accelerator.prepared.optimizers:
            optimizer._reduce_gradients()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def make_scaler(self, accelerator: Run, handler: Any) -> Any | None:
        """Return torch_xla's scaler, which knows that steps are traced."""
        if accelerator.mixed_precision != "fp16":
            return None
        from torch_xla.amp import GradScaler

        return GradScaler(**(handler.to_kwargs() if handler is not None else {}))
