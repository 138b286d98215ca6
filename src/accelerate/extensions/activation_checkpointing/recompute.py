"""Wraps the chosen layers of a model in torch's checkpoint wrapper."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.runtime import torch_private
from accelerate.strategies import shard
from accelerate.strategies.fsdp import logger, public_module

# Operators that take long compared to the memory of their results: matrix products, and attention by each torch kernel.
_ATTENTION = "flash_attention efficient_attention cudnn_attention fused_attention_overrideable flash_attention_for_cpu"
_KEPT = ("mm", "addmm", "bmm", "baddbmm", *(f"_scaled_dot_product_{name}" for name in _ATTENTION.split()))


def checkpoint_activations(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, is_part: Callable[[nn.Module], bool] | None
) -> None:
    """Let parts of a model recompute their activations in backward, in place."""
    if is_part is None:
        logger.warning("activation_checkpointing has no effect without an auto_wrap_policy that chooses layers.")
        return

    options: dict[str, Any] = {}
    if plugin.activation_checkpointing == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in _KEPT if hasattr(torch.ops.aten, name)]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)

    def wrap(module: nn.Module) -> nn.Module:
        wrapped: nn.Module = torch_private.checkpoint_wrapper(module, **options)
        if plugin.activation_checkpointing_offload:
            wrapped = torch_private.offload_wrapper(wrapped)
        return wrapped

    torch_private.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_part)


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let the parts that become shards recompute their activations in backward, in place, and return the model.

    Args:
        accelerator: its state holds the FSDP plugin, whose wrapping policy chooses the parts.
        model: the model before it is sharded.

    Source: https://arxiv.org/abs/1604.06174
    """
    plugin = accelerator.state.fsdp_plugin
    is_part = public_module().fsdp2_prepare_auto_wrap_policy(plugin, model)  # libraries replace it there
    checkpoint_activations(
        model, plugin, is_part and (lambda module: not isinstance(module, shard.CONTAINERS) and is_part(module))
    )
    return model
