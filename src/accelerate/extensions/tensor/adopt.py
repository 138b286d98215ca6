"""Models that arrive sharded: the layout is read from the meshes of their parameters, and the run follows it.

Transformers shards models while it loads them (`DistributedConfig`), and programs do so by `fully_shard` or
`parallelize_module`. This module shards nothing: the Accelerator reads the layout, so that loaders, gradients and
checkpoints fit. Adapters that were added to a sharded model stay unsharded, and are trained in the same way.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.strategies import plugin_record, traits_of
from accelerate.extensions.same_model import consistency
from accelerate.extensions.tensor import experts
from accelerate.extensions.tensor.tensor import sum_replicas
from accelerate.extensions.unsharded import averaging as unsharded
from accelerate.modules.unwrap import is_compiled_module
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime.run import Run
from accelerate.strategies.mesh import submesh
from accelerate.strategies.shard import is_sharded, tensors_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Which dimension of ours a dimension is, by the names that torch, torchtitan and transformers give it.
_ROLES = {"dp_replicate": "dp_replicate", "replicate": "dp_replicate", "tp": "tp", "ep": "ep", "efsdp": "efsdp"}
_ROLES |= dict.fromkeys(("dp_shard", "dp_shard_cp", "shard", "fsdp", "dp"), "dp_shard")


def adopt(accelerator: Run, models: Sequence[nn.Module]) -> None:
    """Let the run follow models whose parameters are DTensors.

    Collective: call on every rank.

    Raises:
        ValueError: a layout is not known, contradicts the Accelerator's, or is not one that trains; nothing is changed.
    """
    layout, parts = accelerator.parallelism_config, []
    for model in models:
        sharded = is_sharded(model._orig_mod if is_compiled_module(model) else model)
        ranks_of = layout_of(model, sharded)
        sizes = {axis: len(ranks) for axis, ranks in ranks_of.items()}
        engine = traits_of(accelerator.distributed_type)
        if (
            engine.own_groups
            or (sharded and engine.sharded and not accelerator.is_fsdp2)
            or not (sharded or {"tp", "ep"} & ranks_of.keys())
        ):
            raise ValueError(
                f"{type(model).__name__} arrives sharded over {sizes} ({'by fully_shard' if sharded else 'without fully_shard'}), which cannot "
                f"train with {accelerator.distributed_type}. Load it unsharded; or shard it by fully_shard, for tensors by parallelize_module over "
                "a mesh with the dimension 'tp', and remove the plugin or use FSDP version 2."
            )
        if not sharded:
            # No strategy averages gradients here, so the ranks that have different experts work on the same batch.
            sizes = {"tp": sizes.get("tp", sizes.get("ep", 1)), "ep": sizes.get("ep", 1)}
        if derived := layout is None or layout.total_size == 1:
            layout = ParallelismConfig(**{f"{axis}_size": sizes[axis] for axis in sizes if axis != "efsdp"})
        layout._validate_accelerator(accelerator)
        if derived and layout.tp_enabled and accelerator._dataloaders:
            raise ValueError(
                f"{type(model).__name__} arrives with layers that {layout.tp_size} ranks share, and a loader was prepared before, which gives "
                f"each of them other batches. Prepare the model first, or pass parallelism_config=ParallelismConfig(tp_size={layout.tp_size})."
            )
        if sharded:
            _compare(accelerator, model, layout, ranks_of, sizes)
            if sizes.get("ep", 1) > 1:
                _refuse_adapted_experts(model)
            parts.append(model)
    for model in parts:
        whole = unsharded.whole(model)
        added = {id(parameter) for parameter in whole.values()}
        others = [tensor for tensor in tensors_of(model).values() if id(tensor) not in added]
        consistency.require_same_model(accelerator, model, others)
        for parameter in whole.values():
            consistency.take_from_first(parameter, accelerator.device)
        unsharded.register(accelerator, model, whole)
    accelerator.state.parallelism_config = layout
    if parts and not accelerator.is_fsdp2:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        accelerator.state._set_engine(plugin_record("fsdp_plugin"), plugin)
    if layout.tp_enabled:
        mesh = submesh(layout.get_device_mesh(accelerator.device.type), "tp")
        for model in parts:  # the others come to `tensor.prepare`, which does so, too
            sum_replicas(model, mesh)


def layout_of(model: nn.Module, sharded: bool) -> dict[str, list[int]]:
    """Return the ranks that share each dimension with this one; ValueError for a dimension that is not known, or in two ways."""
    ranks_of: dict[str, list[int]] = {}
    seen: dict[int, DeviceMesh] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or id(parameter.device_mesh) in seen:
            continue
        mesh = seen[id(parameter.device_mesh)] = parameter.device_mesh
        unnamed = ("dp_replicate", "dp_shard")[-mesh.ndim :] if sharded else ("tp",)
        for number, called in enumerate(mesh.mesh_dim_names or unnamed):
            if called not in _ROLES and mesh.size(number) == 1:  # such as pipelines of one stage
                continue
            ranks = dist.get_process_group_ranks(mesh.get_group(number))
            if called not in _ROLES or ranks_of.setdefault(_ROLES[called], ranks) != ranks:
                raise ValueError(
                    f"The parameter {name!r} of {type(model).__name__} is spread over {called!r}, {mesh.size(number)} ranks of {mesh}, which "
                    f"cannot be adopted: known are the dimensions {', '.join(_ROLES)}, each over the same ranks in all parameters (so far "
                    f"{ranks_of}), and others of size 1. Make {called!r} 1, rename it if it is one of these, or let `prepare` shard the model."
                )
    return ranks_of


def _refuse_adapted_experts(model: nn.Module) -> None:
    """Refuse adapters of experts that are spread over ranks: each rank has adapters of other experts under the same names."""
    names = {id(module): name for name, module in model.named_modules()}
    for name in [names[id(module)] for module in experts.modules(model)]:
        while name.endswith(".base_layer"):  # what PEFT puts around a module keeps it under this name
            name = name.removesuffix(".base_layer")
        if adapter := next((entry for entry in unsharded.whole(model) if entry.startswith(f"{name}.")), None):
            raise ValueError(
                f"{adapter!r} of {type(model).__name__} adapts experts that ranks share out (expert parallelism), so it means other "
                "experts on each rank, and its gradients cannot be averaged. Adapt other layers, or load the model without ep_size."
            )


def _compare(
    accelerator: Run,
    model: nn.Module,
    layout: ParallelismConfig,
    ranks_of: dict[str, list[int]],
    sizes: dict[str, int],
) -> None:
    """Refuse a layout of the Accelerator that is not the model's."""
    replicas, shards, tp = (sizes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp"))
    mesh = layout.get_device_mesh(accelerator.device.type)
    part = submesh(mesh, "tp")
    ours = [accelerator.process_index] if part is None else part.mesh.flatten().tolist()
    model_ranks = ranks_of.get("tp", [accelerator.process_index])
    same = replicas * shards * tp == layout.total_size
    if (
        same
        and ours == model_ranks
        and layout.dp_replicate_size in (1, replicas)
        and layout.ep_size in (1, sizes.get("ep", 1))
    ):
        return
    raise ValueError(
        f"{type(model).__name__} arrives sharded over {sizes}, where this rank shares layers with the ranks {model_ranks}; the Accelerator has "
        f"{layout!r} on {accelerator.num_processes} process(es), with the ranks {ours}. Omit parallelism_config, and it is taken "
        "from the model, or shard the model by the same layout."
    )
