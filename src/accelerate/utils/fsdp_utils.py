"""Fully Sharded Data Parallel: the public path of `accelerate.strategies.fsdp` and `accelerate.checkpoint.fsdp`.

A home of the functions that look up what libraries replace here: how a model is wrapped.
"""

from typing import Any

from torch import nn

from accelerate.base._lazy import front
from accelerate.logging import get_logger
from accelerate.modules.unwrap import is_compiled_module
from accelerate.strategies import shard
from accelerate.strategies.fsdp import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules, public_module

# Names of other modules that this module also gives.
_HOMES = {
    "accelerate.extensions.activation_checkpointing.recompute": "fsdp2_apply_ac",
    "accelerate.extensions.convert.convert": "_distributed_checkpoint_to_merged_weights merge_fsdp_weights",
    "accelerate.modules.unwrap": "is_peft_model",
    "accelerate.extensions.fsdp1.strategy": "ensure_weights_retied",
    "accelerate.extensions.compat.fsdp": (
        "_find_final_norm _prepare_sd_options disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading "
        "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler "
        "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer"
    ),
    "accelerate.checkpoint.fsdp": "_get_model_state_dict _set_model_state_dict",
    "accelerate.base.constants": "SAFE_WEIGHTS_NAME WEIGHTS_NAME FSDP_MODEL_NAME OPTIMIZER_NAME",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])

logger = get_logger(__name__)


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model with `fully_shard`, in place, as the FSDP plugin says.

    Collective: call on every rank.

    Args:
        accelerator: the Accelerator; optimizers that it prepares update the shards.
        model: compiled or not; a sharded model is not changed.

    Returns:
        The model, in its compiled shell if it had one.
    """
    inner = model._orig_mod if is_compiled_module(model) else model
    if shard.is_sharded(inner):
        return model
    plugin = accelerator.state.fsdp_plugin
    if plugin.activation_checkpointing:
        inner = public_module().fsdp2_apply_ac(accelerator, inner)
    ignored = get_parameters_from_modules(plugin.ignored_modules, inner, accelerator.device)
    shard.shard(accelerator, inner, fsdp2_prepare_auto_wrap_policy(plugin, inner), ignored)
    return model
