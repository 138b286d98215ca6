"""Data parallelism: every rank holds a replica, whose gradients torch averages in backward."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.base._warn import warn_user
from accelerate.config.enums import DDPCommunicationHookType
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run
from accelerate.strategies.base import Strategy

# In `Prepared.logged`: the hooks of the prepared models were checked.
_HOOKS = "hooks of parameters"


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
        accelerator.prepared.logged.discard(_HOOKS)
        if handler is not None:
            if handler.comm_hook == DDPCommunicationHookType.BATCHED_POWER_SGD:
                torch_private.let_batched_power_sgd_run()
            handler.register_comm_hook(wrapped)
        return wrapped

    def backward(self, accelerator: Run, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass; before the first one, warn of hooks that get gradients that are not averaged."""
        if _HOOKS not in accelerator.prepared.logged:
            accelerator.prepared.logged.add(_HOOKS)
            if accelerator.num_processes > 1 and accelerator.is_main_process:
                _warn_of_hooks(accelerator._models)
        super().backward(accelerator, loss, **kwargs)

    def no_sync(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return DDP's own context; a model that was never wrapped has nothing to hold back.

        With ``static_graph=True`` the first backward pass synchronises, because DDP learns the graph in it.
        """
        hold = getattr(model, "no_sync", None)
        learns_graph = getattr(model, "static_graph", False) and not model._static_graph_delay_allreduce_enqueued
        return contextlib.nullcontext() if hold is None or learns_graph else hold()


def _warn_of_hooks(models: Sequence[nn.Module]) -> None:
    for model in models:
        names = [name for name, parameter in model.named_parameters() if torch_private.acts_in_backward(parameter)]
        if names:
            warn_user(
                f"{len(names)} parameters of {type(extract_model_from_parallel(model)).__name__} have a hook from "
                f"register_post_accumulate_grad_hook (the first is {names[0]!r}). The hook gets the gradient of its rank, before "
                "DDP averages it: an optimizer that steps in the hook gives each rank other weights. Step after `backward`."
            )
