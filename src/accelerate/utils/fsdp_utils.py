"""Fully Sharded Data Parallel: the public path of `accelerate.strategies.fsdp` and `accelerate.checkpoint.fsdp`.

A home of the functions that look up what libraries replace here: how a model is wrapped, and how its state dict is taken.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.base._lazy import front
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.logging import get_logger
from accelerate.modules.unwrap import is_compiled_module
from accelerate.strategies import shard
from accelerate.strategies.fsdp import (
    checkpoint_activations,
    fsdp2_prepare_auto_wrap_policy,
    get_parameters_from_modules,
    public_module,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

# Names of other modules that this module also gives.
_HOMES = {
    "accelerate.extensions.convert.convert": "_distributed_checkpoint_to_merged_weights merge_fsdp_weights",
    "accelerate.modules.unwrap": "is_peft_model",
    "accelerate.strategies.fsdp": (
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied"
    ),
    "accelerate.extensions.compat.fsdp": (
        "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler"
    ),
    "accelerate.checkpoint.fsdp": "_get_model_state_dict _set_model_state_dict load_fsdp_optimizer save_fsdp_optimizer",
    "accelerate.base.constants": "SAFE_WEIGHTS_NAME WEIGHTS_NAME FSDP_MODEL_NAME OPTIMIZER_NAME",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])

logger = get_logger(__name__)


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Any,
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a sharded model.

    Collective: call on every rank.

    Args:
        fsdp_plugin: its `state_dict_type` chooses the format. FULL_STATE_DICT: one file, `pytorch_model_fsdp.bin`, gathered
            by rank 0. Else the folder `pytorch_model_fsdp_0`, to which each rank writes its part, and which any number of
            ranks can load. None writes shards.
        accelerator: not used; the model has all information.
        model: wrapped by torch's FullyShardedDataParallel, or sharded in place; any other model can also be saved.
        output_dir: the checkpoint's folder, which all ranks see.
        model_index: which of the models it is, from 0.
        adapter_only: only the active adapter, if it is a PEFT model.
        use_dcp: False warns: a file per rank, which only as many ranks could load, is not written.

    Raises:
        ValueError: `output_dir` is a checkpoint of `save_state`, whose manifest lists its files.
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    from accelerate.checkpoint import layouts
    from accelerate.checkpoint.model_io import io_of

    getter = partial(public_module()._get_model_state_dict, adapter_only=adapter_only)
    layout = layouts.layout_of(fsdp_plugin, use_dcp)
    layouts.write(io_of(model).model_state(model, getter).values, output_dir, "model", model_index, layout)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Any,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load a sharded model.

    The number of ranks and the sharding may differ from those of the save. All data is read before anything is changed.

    Collective: call on every rank.

    Args:
        fsdp_plugin: its `state_dict_type` chooses the format if the folder has several layouts of the model; None: shards.
        accelerator: not used.
        model: see `save_fsdp_model`.
        input_dir: the checkpoint's folder, which all ranks see.
        model_index: which of the models it is, from 0.
        adapter_only: the checkpoint holds only the active adapter, if it is a PEFT model.
        use_dcp: False warns, as for saving.

    Returns:
        The missing and unexpected keys.

    Raises:
        FileNotFoundError: the folder has no such model.
        RuntimeError: it is another model, or reading failed on some rank; the model is as it was.
        DamagedCheckpoint: a file is damaged; the model is as it was.
    """
    from accelerate.checkpoint import layouts
    from accelerate.checkpoint.model_io import io_of
    from accelerate.checkpoint.state import run_on_all_ranks
    from accelerate.checkpoint.verify import with_manifest

    getter = partial(public_module()._get_model_state_dict, adapter_only=adapter_only)
    setter = partial(public_module()._set_model_state_dict, adapter_only=adapter_only)
    prefer = layouts.layout_of(fsdp_plugin, use_dcp)
    folder = with_manifest(input_dir)
    state, own = run_on_all_ranks(lambda: layouts.read_for_model(model, folder, model_index, prefer, getter=getter))
    return io_of(model).apply_model(model, state, own, setter)


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let the parts that become shards recompute their activations in backward, in place, and return the model.

    Args:
        accelerator: its state holds the FSDP plugin, whose wrapping policy chooses the parts.
        model: the model before it is sharded.

    Source: https://arxiv.org/abs/1604.06174
    """
    plugin = accelerator.state.fsdp_plugin
    is_part = fsdp2_prepare_auto_wrap_policy(plugin, model)
    checkpoint_activations(
        model, plugin, is_part and (lambda module: not isinstance(module, shard.CONTAINERS) and is_part(module))
    )
    return model


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
        inner = fsdp2_apply_ac(accelerator, inner)
    ignored = get_parameters_from_modules(plugin.ignored_modules, inner, accelerator.device)
    shard.shard(accelerator, inner, fsdp2_prepare_auto_wrap_policy(plugin, inner), ignored)
    return model


def _prepare_sd_options(fsdp_plugin: FullyShardedDataParallelPlugin) -> "StateDictOptions | None":
    """Return torch's options for the state dict that a plugin asks for; None with FSDP 1, which has its own."""
    if fsdp_plugin.fsdp_version == 1:
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from accelerate.checkpoint import layouts

    full = layouts.layout_of(fsdp_plugin) == "full"
    offload = bool(getattr(fsdp_plugin.state_dict_config, "offload_to_cpu", True))
    return StateDictOptions(full_state_dict=full, cpu_offload=offload, broadcast_from_rank0=full)


def _find_final_norm(model: nn.Module) -> nn.Module | None:
    """Return the last norm among the children of a model, or of the base model that a model of transformers names."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    norms = [child for child in base.children() if "norm" in type(child).__name__.lower()]
    return norms[-1] if norms else None
