"""Data parallelism: every rank holds a replica, whose gradients torch averages in backward."""

import contextlib

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.config.enums import DDPCommunicationHookType
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run
from accelerate.strategies.base import Strategy


class DataParallel(Strategy):
    """torch's DistributedDataParallel, with gloo, NCCL or a vendor's backend."""

    synchronises = True

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Whether the model has gradients to average: a frozen one (a teacher, say) has none, and torch refuses it."""
        return any(parameter.requires_grad for parameter in model.parameters())

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Put DistributedDataParallel around the model, with the user's settings and communication hook."""
        if isinstance(model, DistributedDataParallel) or not self.needs_wrapper(accelerator, model):
            return model
        handler = accelerator.ddp_handler
        options = handler.to_kwargs() if handler is not None else {}
        # The hooks are ours to register; the constructor knows nothing of them.
        for name in ("comm_hook", "comm_wrapper", "comm_state_option"):
            options.pop(name, None)
        device = accelerator.device
        if device.type not in ("cpu", "hpu") and not accelerator.verify_device_map(model):
            options.update(device_ids=[device.index], output_device=device.index)
        wrapped = DistributedDataParallel(model, **options)
        if handler is not None:
            if handler.comm_hook == DDPCommunicationHookType.BATCHED_POWER_SGD:
                torch_private.let_batched_power_sgd_run()
            handler.register_comm_hook(wrapped)
        return wrapped

    def no_sync(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return DDP's own context; a model that was never wrapped has nothing to hold back.

        With ``static_graph=True`` the first backward pass synchronises, because DDP learns the graph in it.
        """
        hold = getattr(model, "no_sync", None)
        learns_graph = getattr(model, "static_graph", False) and not model._static_graph_delay_allreduce_enqueued
        return contextlib.nullcontext() if hold is None or learns_graph else hold()
