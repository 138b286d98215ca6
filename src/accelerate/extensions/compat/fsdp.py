"""Functions for sharded models and their optimizers that programs import from `accelerate.utils.fsdp_utils`."""

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint import formats, layouts, optimizers, plain_data
from accelerate.checkpoint.manifest import NAME
from accelerate.checkpoint.model_io import inner_optimizer, io_of
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Kind, Layout, from_first_rank, gathered, rank_and_size, run_on_all_ranks
from accelerate.checkpoint.storage import LocalStorage
from accelerate.checkpoint.verify import with_manifest
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.modules import tensor_kinds
from accelerate.modules.unwrap import canonical_name
from accelerate.strategies import shard
from accelerate.strategies.fsdp import public_module

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


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


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Distribute rank 0's full state dict over a sharded model; other ranks hold no more than their shards.

    Collective: call on every rank.

    Args:
        accelerator: the Accelerator.
        model: sharded by `fully_shard`; shards without memory get some.
        full_sd: on rank 0, full tensors by name; not used elsewhere. Buffers outside all state dicts do not change.
        cpu_offload: shards stay in host memory.

    Raises:
        RuntimeError: rank 0's state does not fit the model.
    """
    state_names = {canonical_name(name) for name in model.state_dict()}
    kept = {
        name: buffer
        for name, buffer in model.named_buffers()
        if canonical_name(name) not in state_names and not buffer.is_meta
    }
    if any(parameter.is_meta for parameter in model.parameters()):
        shard.allocate(model, accelerator.device, cpu_offload)
        for name, buffer in kept.items():
            module, _, entry = name.rpartition(".")
            model.get_submodule(module)._buffers[entry] = buffer.to(accelerator.device)
    shard.distribute(accelerator, model, full_sd, optional=[canonical_name(name) for name in kept])


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
    getter = partial(public_module()._get_model_state_dict, adapter_only=adapter_only)
    layout = layouts.layout_of(fsdp_plugin, use_dcp)
    _write(io_of(model).model_state(model, getter).values, output_dir, "model", model_index, layout)


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
    getter = partial(public_module()._get_model_state_dict, adapter_only=adapter_only)
    setter = partial(public_module()._set_model_state_dict, adapter_only=adapter_only)
    prefer = layouts.layout_of(fsdp_plugin, use_dcp)
    folder = with_manifest(input_dir)
    state, own = run_on_all_ranks(lambda: layouts.read_for_model(model, folder, model_index, prefer, getter=getter))
    return io_of(model).apply_model(model, state, own, setter)


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
    _write(io_of(model).optimizer_state(optimizer, model), output_dir, "optimizer", optimizer_index, layout)


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
    folder = with_manifest(input_dir)
    state = run_on_all_ranks(lambda: optimizers.read_for_optimizer(optimizer, model, folder, optimizer_index, prefer))
    inner = inner_optimizer(optimizer)
    inner.load_state_dict(dict(tensor_kinds.rebuilt(inner, state)))


def _write(values: dict[str, Any], folder: str, kind: Kind, index: int, layout: Layout) -> None:
    """Write a state into a folder that all ranks see: shards aside, until they take their place together. A plan only takes the state.

    ValueError for a folder with a manifest; a failure is raised on all ranks. Collective: call on every rank.
    """
    if isinstance(folder, SavePlan):  # of a Trainer's checkpoint, which may be written in the background
        return layouts.write(values, folder, kind, index, layout)
    shards, file = layouts.usual_names(kind, index)
    main = rank_and_size()[0] == 0
    if layout == "full":
        values = gathered(values)

    def prepare() -> None:
        plain_data.refuse_unreadable({f"{kind} {index}": values}, ignores_tensors=True)
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(os.path.join(folder, NAME)):
            raise ValueError(f"{os.fspath(folder)!r} is a checkpoint of save_state. Save to another folder.")
        if layout == "full" and main:
            formats.write_torch(os.path.join(folder, file), values)

    run_on_all_ranks(prepare)
    if layout == "full":
        return
    from accelerate.checkpoint import dcp  # here: torch's planner takes 50 ms to import

    storage = LocalStorage(os.path.join(folder, shards))
    staged = from_first_rank(run_on_all_ranks(lambda: storage.stage() if main else ""))
    try:
        dcp.save({kind: values}, staged)
        run_on_all_ranks(lambda: storage.publish() if main else None)
    finally:
        storage.discard()


def _prepare_sd_options(fsdp_plugin: FullyShardedDataParallelPlugin) -> "StateDictOptions | None":
    """Return torch's options for the state dict that a plugin asks for; None with FSDP 1, which has its own."""
    if fsdp_plugin.fsdp_version == 1:
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    full = layouts.layout_of(fsdp_plugin) == "full"
    offload = bool(getattr(fsdp_plugin.state_dict_config, "offload_to_cpu", True))
    return StateDictOptions(full_state_dict=full, cpu_offload=offload, broadcast_from_rank0=full)


def _find_final_norm(model: nn.Module) -> nn.Module | None:
    """Return the last norm among the children of a model, or of the base model that a model of transformers names."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    norms = [child for child in base.children() if "norm" in type(child).__name__.lower()]
    return norms[-1] if norms else None


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only rank 0 read the weights in `from_pretrained`; sharding then sends them to the others."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every rank read the weights in `from_pretrained`, as for a model that is not going to be sharded."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"
