"""A strategy of a third party: replicas whose gradients are averaged after the backward pass, by an all-reduce of one's own.

It knows `accelerate.backends` alone. The suite installs it as a distribution of its own, with an entry point.
"""

import contextlib
import os

import torch.distributed as dist

from accelerate.strategies.base import Backend
from accelerate.strategies.registry import StrategySpec


class Averaging(Backend):
    """Averages what gradients are there at the end of a window."""

    name = "averaging"
    synchronises = True

    def wrap_model(self, accelerator, model):
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return model

    @contextlib.contextmanager
    def no_sync(self, accelerator, model):
        # A backend has no state; the Accelerator does.
        accelerator._averaging_held = True
        try:
            yield
        finally:
            accelerator._averaging_held = False

    def backward(self, accelerator, loss, **options):
        super().backward(accelerator, loss, **options)
        if getattr(accelerator, "_averaging_held", False):
            return
        for model in accelerator._models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= accelerator.num_processes


SPEC = StrategySpec(
    "averaging", lambda state: os.environ.get("AVERAGING_BACKEND") == "1", f"{__name__}:{Averaging.__name__}"
)
