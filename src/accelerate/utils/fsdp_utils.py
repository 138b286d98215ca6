"""Helpers around Fully Sharded Data Parallel: loading, wrapping policies, parameter names, state dicts, merging."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from accelerate._lazy import front
from accelerate.checkpoint import layouts, load, low_bit, optimizers
from accelerate.checkpoint import state as states
from accelerate.config.fsdp import FullyShardedDataParallelPlugin, layer_classes
from accelerate.logging import get_logger
from accelerate.modules.optimizer_remap import ties
from accelerate.modules.unwrap import canonical_name, extract_model_from_parallel, is_compiled_module
from accelerate.parallel import shard
from accelerate.runtime import torch_private
from accelerate.utils.modeling import is_peft_model

# What this module gives and does not hold itself.
_HOMES = {
    "accelerate.checkpoint.convert": "merge_fsdp_weights",
    "accelerate.utils.constants": "FSDP_MODEL_NAME OPTIMIZER_NAME SAFE_WEIGHTS_NAME WEIGHTS_NAME",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])

logger = get_logger(__name__)


# -- loading -----------------------------------------------------------------------------------------------------


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only rank 0 read the weights in `from_pretrained`; sharding then sends them to the others."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every rank read the weights in `from_pretrained`, as for a model that is not going to be sharded."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Return a `param_init_fn` that keeps tied weights tied.

    Moving modules off the meta device one at a time gives each its own copy of a weight that they share.

    Args:
        param_init_fn: materialises the parameters that a module holds directly.
        model: the model as it is now, with its ties.
        device: where the parameters go.

    Returns:
        `param_init_fn` itself if no weight is shared, else a function that also restores the ties.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    places = [[name.rpartition(".") for name in names] for _, names in ties(model)]
    group_of = {(modules[owner], own): group for group, names in enumerate(places) for owner, _, own in names}
    if not group_of:
        return param_init_fn
    shared: dict[int, nn.Parameter] = {}

    def init_and_retie(module: nn.Module) -> nn.Module:
        param_init_fn(module)
        for name, parameter in list(module._parameters.items()):
            if (group := group_of.get((module, name))) is None:
                continue
            if group not in shared and parameter.device.type != torch.device(device).type:
                parameter = nn.Parameter(parameter.to(device), requires_grad=parameter.requires_grad)
            module._parameters[name] = shared.setdefault(group, parameter)
        return module

    return init_and_retie


# -- what is sharded ---------------------------------------------------------------------------------------------


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of some modules, moved to a device, so that FSDP can leave them unsharded.

    Args:
        modules: modules, or a regular expression that the whole name of a module matches; None means none.
        model: where names are looked up.
        device: FSDP does not move ignored parameters, so it is done here.

    Example:
        >>> len(get_parameters_from_modules("0", nn.Sequential(nn.Linear(2, 2)), torch.device("cpu")))
        2
    """
    return {parameter for module in chosen_modules(modules, model) for parameter in module.to(device).parameters()}


def chosen_modules(modules: Any, model: nn.Module) -> Iterable[nn.Module]:
    """Return the modules that a plugin's `ignored_modules` stands for; see `get_parameters_from_modules`."""
    if isinstance(modules, str):
        return [module for name, module in model.named_modules() if re.fullmatch(modules, name)]
    if isinstance(modules, nn.Module) and not isinstance(modules, (nn.ModuleList, nn.Sequential)):
        return [modules]
    return () if modules is None else modules


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Turn the plugin's wrapping policy into a function from a module to whether it becomes a shard of its own.

    Args:
        fsdp2_plugin: its `auto_wrap_policy` is one of torch's policies, bound to a model or not, one of its policy objects,
            or a callable that takes a module, or what torch's policies take (`module`, `recurse`, `nonwrapped_numel`).
        model: the model about to be sharded.

    Returns:
        The function, or None when only the whole model is sharded.

    Raises:
        ValueError: a class name of the plugin does not occur in the model.
    """
    from torch.distributed.fsdp import wrap

    policy = fsdp2_plugin.auto_wrap_policy
    bound = policy.keywords if isinstance(policy, partial) else {}
    function = policy.func if isinstance(policy, partial) else policy
    if function is None:
        return None
    if function is wrap.transformer_auto_wrap_policy:
        classes = bound.get("transformer_layer_cls")
        classes = tuple(layer_classes(fsdp2_plugin, model) if classes is None else classes)
        return lambda module: isinstance(module, classes)
    if function is wrap.size_based_auto_wrap_policy:
        smallest = bound.get("min_num_params", fsdp2_plugin.min_num_params)
        return (lambda module: _numel(module) >= smallest) if smallest else None
    if torch_private.is_wrap_policy(policy):
        selected = torch_private.chosen_modules(policy, model)
        return lambda module: module in selected
    parameters = inspect.signature(policy).parameters
    if "recurse" in parameters:
        size = {"nonwrapped_numel"} & set(parameters)
        return lambda module: policy(module, recurse=False, **{name: _numel(module) for name in size})
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return lambda module: policy(module=module, recurse=False, nonwrapped_numel=_numel(module))
    return policy


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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


# What takes long to compute again, for the memory of its result: matrix products, and attention by each of torch's kernels.
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
        made = torch_private.checkpoint_wrapper(module, **options)
        return torch_private.offload_wrapper(made) if plugin.activation_checkpointing_offload else made

    torch_private.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_part)


# -- names and optimizers ----------------------------------------------------------------------------------------


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by the names they had before `torch.compile` and activation checkpointing wrapped modules.

    Example:
        >>> fsdp2_canonicalize_names({"_orig_mod.layer._checkpoint_wrapped_module.weight": 1})
        {'layer.weight': 1}
    """
    return {canonical_name(name): value for name, value in named_params.items()}


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]) -> None:
    """Let an optimizer that was made before sharding update the sharded parameters, in place.

    Args:
        optimizer: it must not have stepped, because its state has the old shapes.
        mapping: from each old parameter, or its `data_ptr`, to the new one.

    Raises:
        KeyError: a parameter of the optimizer is not in `mapping`; nothing was changed.
    """
    switched = []
    for index, group in enumerate(optimizer.param_groups):
        new = []
        for position, parameter in enumerate(group["params"]):
            # An earlier step may have written the address on the parameter, because its storage is gone by now.
            address = parameter.data_ptr
            address = address() if callable(address) else address
            key = parameter if parameter in mapping else address
            if key not in mapping:
                raise KeyError(
                    f"Parameter {position} of the optimizer's group {index} (shape {tuple(parameter.shape)}) has no sharded "
                    "counterpart. Make the optimizer from the parameters of the model that is prepared with it."
                )
            new.append(mapping[key])
        switched.append(new)
    for group, new in zip(optimizer.param_groups, switched, strict=True):
        group["params"] = new


def get_fsdp2_grad_scaler(**kwargs: Any) -> "torch.amp.GradScaler":
    """Return a gradient scaler for fp16 with `fully_shard`; its sharded gradients need no special one."""
    return torch.amp.GradScaler(**kwargs)


# -- state dicts -------------------------------------------------------------------------------------------------


def _get_model_state_dict(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> dict[str, Any]:
    """Return a model's state dict, or that of the active adapter of a PEFT model. With `sd_options` every rank calls it.

    `sd_options` are torch's `StateDictOptions` for gathering a sharded model; None takes this rank's tensors as they are. With
    `full_state_dict` and `cpu_offload`, ranks other than 0 get an empty dictionary.
    """
    if sd_options is None:
        state = None
    elif sd_options.full_state_dict and sd_options.cpu_offload and states.is_fsdp1(model):
        # Torch frees what it gathered for rank 0 before it was copied, where that is host memory, and crashes.
        whole = states.gathered(states.model_state(model).values)
        state = whole if states.rank_and_size()[0] == 0 else {}
    else:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = get_model_state_dict(model, options=sd_options)
    if adapter_only and is_peft_model(model):
        # Gathered first: PEFT picks entries by name, and would otherwise pick this rank's shards.
        return adapter_entries(model, model.state_dict() if state is None else state) if state != {} else state
    return model.state_dict() if state is None else state


def _set_model_state_dict(
    model: nn.Module, state_dict: dict[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Load what `_get_model_state_dict` returned; return missing and unexpected keys.

    With `sd_options` every rank calls it.
    """
    if adapter_only and is_peft_model(model):
        from peft import set_peft_model_state_dict

        if states.is_fsdp1(model):
            return _load_adapter(model, state_dict)
        return set_peft_model_state_dict(model, state_dict, adapter_name=model.active_adapter)
    if sd_options is not None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        return set_model_state_dict(model, state_dict, options=sd_options)
    return model.load_state_dict(state_dict)


# PEFT looks for the names of modules, and in models that FSDP1 wraps FSDP1's own are among them.


def adapter_entries(model: nn.Module, state: Mapping[str, Any], adapter: str | None = None) -> dict[str, Any]:
    """Return an adapter's entries of a state, by the names in its file; by default the active one's. Any rank.

    Args:
        model: a model with adapters of PEFT, wrapped or not.
        state: all entries of its state dict, by the names the user wrote or those of a wrapped model.
        adapter: the adapter's name.
    """
    from peft import get_peft_model_state_dict

    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    # Of a wrapper and what it wraps the latter, which comes last.
    inside = {canonical_name(name): name for name, _ in inner.named_modules()}
    steps = {name: canonical_name(name).rpartition(".") for name in state}
    state = {f"{inside.get(owner, owner)}{dot}{own}": state[name] for name, (owner, dot, own) in steps.items()}
    found = get_peft_model_state_dict(inner, state_dict=state, adapter_name=adapter or inner.active_adapter)
    return {canonical_name(name): value for name, value in found.items()}


def _load_adapter(model: nn.Module, adapter: Mapping[str, Any]) -> Any:
    """Load what `adapter_entries` returned together with the rest, since FSDP1 loads all parameters. All ranks."""
    whole = model.state_dict()
    names = {id(value): name for name, value in whole.items()}
    own = adapter_entries(model, whole)
    known = {names[id(value)]: adapter[name] for name, value in own.items() if name in adapter}
    return model.load_state_dict({**whole, **known})


# -- checkpoints -------------------------------------------------------------------------------------------------


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Any,
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a sharded model. Every rank calls it.

    Args:
        fsdp_plugin: its `state_dict_type` chooses what is written. FULL_STATE_DICT: one file,
            `pytorch_model_fsdp.bin`, gathered by rank 0. Else the folder `pytorch_model_fsdp_0`, to which each rank writes its
            part, and which any number of ranks can load. None writes shards.
        accelerator: not used; a checkpoint needs no more than the model knows.
        model: wrapped by torch's FullyShardedDataParallel, or sharded in place; any other model can be saved, too.
        output_dir: the checkpoint's folder, which all ranks see.
        model_index: which of the models it is, from 0.
        adapter_only: only the active adapter, if it is a PEFT model.
        use_dcp: False warns: a file per rank, which only as many ranks could load, is not written.

    Raises:
        ValueError: `output_dir` is a checkpoint of `save_state`, whose manifest lists its files.
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    getter = partial(_get_model_state_dict, adapter_only=adapter_only)
    layout = layouts.layout_of(fsdp_plugin, use_dcp)
    layouts.write(states.model_state(model, getter).values, output_dir, "model", model_index, layout)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Any,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load a sharded model. Every rank calls it.

    It need not have been saved by the same number of ranks, or sharded in the same way, or sharded at all. Everything is read
    before anything is changed.

    Args:
        fsdp_plugin: its `state_dict_type` chooses what is read if the folder has several layouts of the model; None: shards.
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

    getter = partial(_get_model_state_dict, adapter_only=adapter_only)
    setter = partial(_set_model_state_dict, adapter_only=adapter_only)
    prefer = layouts.layout_of(fsdp_plugin, use_dcp)
    folder = load.with_manifest(input_dir)
    state, own, _ = states.run_on_all_ranks(
        lambda: layouts.read_for_model(model, folder, model_index, prefer, getter=getter)
    )
    return states.apply_model(model, state, own, setter)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the optimizer of a sharded model, keyed by the names of parameters. Every rank calls it.

    Args:
        fsdp_plugin: its `state_dict_type` chooses what is written: with FULL_STATE_DICT the file `optimizer.bin`, gathered by
            rank 0; else the folder `optimizer_0`, to which each rank writes its part, and which any number can load. None writes shards.
        accelerator: not used.
        optimizer: wrapped or not.
        model: the model that it updates.
        output_dir: the checkpoint's folder, which all ranks see.
        optimizer_index: which of the optimizers it is, from 0.
        use_dcp: False warns: a file per rank is not written.

    Raises:
        ValueError: the optimizer has a parameter that the model does not have, or `output_dir` is a checkpoint of `save_state`.
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    layout = layouts.layout_of(fsdp_plugin, use_dcp)
    layouts.write(states.optimizer_state(optimizer, model), output_dir, "optimizer", optimizer_index, layout)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the optimizer of a sharded model. Every rank calls it.

    It need not have been saved by the same number of ranks, or sharded in the same way, or sharded at all. Everything is read
    before anything is changed.

    Args:
        fsdp_plugin: its `state_dict_type` chooses what is read if the folder has several layouts of the optimizer; None: shards.
        accelerator: not used.
        optimizer: wrapped or not.
        model: the model that it updates.
        input_dir: the checkpoint's folder, which all ranks see.
        optimizer_index: which of the optimizers it is, from 0.
        adapter_only: not used: the state is that of the parameters which the optimizer has.
        use_dcp: False warns, as for saving.

    Raises:
        FileNotFoundError: the folder has no such optimizer.
        RuntimeError: it is the state of other parameters, or reading failed on some rank; the optimizer is as it was.
        DamagedCheckpoint: a file is damaged; the optimizer is as it was.
    """
    prefer = layouts.layout_of(fsdp_plugin, use_dcp)
    folder = load.with_manifest(input_dir)
    state = states.run_on_all_ranks(
        lambda: optimizers.read_for_optimizer(optimizer, model, folder, optimizer_index, prefer).state
    )
    inner = states.inner_optimizer(optimizer)
    # What it keeps as it is may be memory of the file.
    inner.load_state_dict(load.in_memory(low_bit.rebuilt(inner, state)))


# -- sharding ----------------------------------------------------------------------------------------------------


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model with `fully_shard`, in place, as the FSDP plugin says. Every rank calls it.

    Args:
        accelerator: the Accelerator; optimizers that it prepares update the shards.
        model: compiled or not; one that is sharded already is left alone.

    Returns:
        The model, in its compiled shell if it came in one.
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


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Distribute rank 0's full state dict over a sharded model; no other rank holds more than its shards. Every rank calls it.

    Args:
        accelerator: the Accelerator.
        model: sharded by `fully_shard`; shards that have no memory yet get some.
        full_sd: on rank 0, whole tensors by name; not used elsewhere. Buffers that no state dict has stay as they are.
        cpu_offload: shards stay in host memory.

    Raises:
        RuntimeError: rank 0's state does not fit the model.
    """
    own = {canonical_name(name) for name in model.state_dict()}
    kept = {
        name: buffer
        for name, buffer in model.named_buffers()
        if canonical_name(name) not in own and not buffer.is_meta
    }
    if any(parameter.is_meta for parameter in model.parameters()):
        shard.allocate(model, accelerator.device, cpu_offload)
        for name, buffer in kept.items():
            module, _, entry = name.rpartition(".")
            model.get_submodule(module)._buffers[entry] = buffer.to(accelerator.device)
    shard.distribute(accelerator, model, full_sd, optional=[canonical_name(name) for name in kept])
