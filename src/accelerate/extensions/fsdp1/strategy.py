"""FSDP in its first version: torch's FullyShardedDataParallel, which flattens the parameters of each unit and shards the result."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint.model_io import inner_optimizer
from accelerate.config.handlers import GradScalerKwargs
from accelerate.devices import row
from accelerate.extensions.activation_checkpointing.recompute import checkpoint_activations
from accelerate.extensions.fsdp1 import is_fsdp1
from accelerate.extensions.fsdp1.torch_private import member_names
from accelerate.extensions.same_model import consistency
from accelerate.extensions.unsharded import averaging
from accelerate.modules import tensor_kinds
from accelerate.modules.optimizer_remap import named, remap_optimizers, ties
from accelerate.modules.unwrap import is_compiled_module, loaded_wrappers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision import master
from accelerate.runtime.run import Run
from accelerate.strategies import fsdp
from accelerate.strategies.mesh import check_backend, shard_mesh
from accelerate.strategies.sharded import Sharded, note_unsharded_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}
# Options of the plugin that torch's wrapper takes under the same name.
_PREFETCHES = ("backward_prefetch", "forward_prefetch")
_HANDED_ON = ("auto_wrap_policy", "sync_module_states", *_PREFETCHES, "use_orig_params", "limit_all_gathers")


class FSDP1(Sharded):
    """Torch's wrapper FullyShardedDataParallel, with every option of the plugin."""

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse dimensions of the mesh that flat parameters cannot have, and optimizers whose states torch cannot gather from them."""
        for low_bit_optimizer in filter(tensor_kinds.kept_by, map(inner_optimizer, objects)):
            raise ValueError(
                f"{type(low_bit_optimizer).__name__} keeps states of few bits, which fsdp_version=1 cannot gather for a checkpoint. Set fsdp_version=2."
            )
        layout = accelerator.parallelism_config
        if layout is not None:
            if layout.tp_enabled:
                raise ValueError(f"tp_size={layout.tp_size} with fsdp_version=1 splits no layers. Set fsdp_version=2.")
            _check_replicas(layout, accelerator.state.fsdp_plugin)
        super().check(accelerator, objects)

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Put FullyShardedDataParallel around the model and its units."""
        inner: Any = model._orig_mod if is_compiled_module(model) else model
        if is_fsdp1(inner):
            return model
        from torch.distributed.fsdp import FullyShardedDataParallel

        plugin = accelerator.state.fsdp_plugin
        if accelerator.mixed_precision != "no":
            # Frozen weights follow where a flat parameter may hold both, which has one dtype.
            if master.upcast(inner) and plugin.use_orig_params:
                master.upcast_frozen(inner)
        plugin.set_auto_wrap_policy(inner)
        before = named(inner)
        options = _options(accelerator, inner)
        ignored = [p for module in options["ignored_modules"] for p in module.parameters()]
        consistency.require_same_model(accelerator, inner, ignored, from_main=options["sync_module_states"])
        if options["sync_module_states"] and accelerator.device.type == "cpu":
            # Torch does it between devices only.
            _send_states(inner, options["param_init_fn"])
            options.update(sync_module_states=False, param_init_fn=None)
        with contextlib.nullcontext() if plugin.use_orig_params else _standing_in(inner, ignored):
            wrapped = FullyShardedDataParallel(inner, **options)
        if plugin.activation_checkpointing:
            parts = [part for part in wrapped.modules() if isinstance(part, FullyShardedDataParallel)]
            units = {part.module for part in parts if part is not wrapped}
            checkpoint_activations(wrapped, plugin, units.__contains__ if units else None)
        if plugin.use_orig_params:
            remap_optimizers(accelerator, wrapped, before)
        else:
            _repoint_flat(accelerator, wrapped, before)
        if ignored:
            trained_ids = {id(parameter) for parameter in ignored if parameter.requires_grad}
            averaging.register(accelerator, wrapped, {name: p for name, p in before.items() if id(p) in trained_ids})
        return type(model)(wrapped, model.dynamo_ctx) if inner is not model else wrapped

    def no_sync(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return FSDP's own context, in which each rank keeps unsharded gradients."""
        hold: Callable[[], contextlib.AbstractContextManager[None]] | None = getattr(model, "no_sync", None)
        if hold is None:  # prepared for evaluation
            return contextlib.nullcontext()
        note_unsharded_gradients(accelerator, model)
        return hold()

    @contextlib.contextmanager
    def whole_parameters(self, accelerator: Run, model: nn.Module) -> Iterator[nn.Module]:
        """Gather all units at once. Units refuse a forward while gathered, so the wrapped modules replace them.

        Collective: call on every rank.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        summoned = FullyShardedDataParallel.summon_full_params(model, writeback=False)
        with summoned, contextlib.ExitStack() as last:
            for parts in [owner._modules for owner in model.modules()]:
                units = {name: part for name, part in parts.items() if isinstance(part, FullyShardedDataParallel)}
                last.callback(parts.update, units)
                parts.update({name: unit.module for name, unit in units.items()})
            yield self.unwrap_model(model)

    def make_scaler(self, accelerator: Run, handler: GradScalerKwargs | None) -> Any | None:
        """Return the scaler whose decision to skip a step all ranks share."""
        scaler = super().make_scaler(accelerator, handler)
        if scaler is not None:
            scaler.spread = True
        return scaler

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip to the norm of the full tensors; ValueError for a part of a model's parameters.

        Collective: call on every rank.
        """
        remaining = {id(p): p for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        roots: list[Any] = []
        for model in accelerator._models:
            root: Any = model._orig_mod if is_compiled_module(model) else model
            model_ids = {id(parameter) for parameter in root.parameters()}
            shards = isinstance(root, loaded_wrappers())
            if not shards or not model_ids & remaining.keys():
                continue
            trained = {id(p) for p in root.parameters() if p.requires_grad}
            if not trained <= remaining.keys():
                raise ValueError(
                    f"clip_grad_norm_ got {len(model_ids & remaining.keys())} of the {len(model_ids)} parameters of {type(model).__name__}. "
                    "FSDP1 knows the norm of all gradients only. Pass model.parameters(), or set fsdp_version=2."
                )
            roots.append(root)
            remaining = {key: parameter for key, parameter in remaining.items() if key not in model_ids}
        if len(roots) == 1 and not remaining:
            norm: torch.Tensor = roots[0].clip_grad_norm_(max_norm, norm_type)
            return norm
        return _clip_together(roots, list(remaining.values()), max_norm, norm_type)


def _check_replicas(layout: ParallelismConfig, plugin: Any) -> None:
    """Refuse a mesh and a strategy that say different things about replicas."""
    name = (plugin.sharding_strategy or plugin.reshard_after_forward).name
    replicas: int = layout.dp_replicate_size  # type: ignore[assignment]  # no size is None
    shards = layout.dp_shard_cp_dim_names
    if replicas > 1 and not shards:
        raise ValueError(
            f"dp_replicate_size={replicas} and dp_shard_size=1 shard nothing. Set dp_replicate_size=1 and "
            f"dp_shard_size={replicas}, or both above 1 for replicas of shards, or leave the FSDP plugin away."
        )
    if replicas > 1 and name == "NO_SHARD":
        raise ValueError(
            f"sharding_strategy=NO_SHARD keeps unsharded parameters, but dp_shard_size={layout.dp_shard_size} shards them. Use FULL_SHARD."
        )
    if replicas == 1 and shards and "HYBRID" in name:
        raise ValueError(
            f"sharding_strategy={name} keeps replicas of shards, but dp_replicate_size is 1. Use FULL_SHARD."
        )


def _clip_together(roots: list[Any], others: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip several models, and parameters outside them, to one norm."""
    norms = [root.clip_grad_norm_(float("inf"), norm_type) for root in roots]  # infinite: nothing is scaled
    if others:
        norms.append(nn.utils.get_total_norm([p.grad for p in others if p.grad is not None], norm_type))
    if not norms:
        return torch.zeros(())
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), norm_type)
    parameters = [parameter for root in roots for parameter in root.parameters()] + others
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _options(accelerator: Run, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of torch's wrapper."""
    from torch.distributed.fsdp import ShardingStrategy

    plugin, device = accelerator.state.fsdp_plugin, accelerator.device
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    mesh = _mesh(accelerator, strategy)
    if mesh is not None and mesh.ndim == 2 and strategy.name in _HYBRID:
        strategy = getattr(ShardingStrategy, _HYBRID[strategy.name])
    initialise = plugin.param_init_fn
    if initialise is not None:
        initialise = ensure_weights_retied(initialise, model, device)
    ignored = fsdp.chosen_modules(plugin.ignored_modules, model)
    return {
        **{name: getattr(plugin, name) for name in _HANDED_ON},
        "sharding_strategy": strategy,
        "cpu_offload": plugin.cpu_offload if device.type != "cpu" else None,
        "mixed_precision": plugin.mixed_precision_policy,
        "param_init_fn": initialise,
        # The wrapper leaves them where they are.
        "ignored_modules": [module.to(device) for module in ignored],
        # The device of a single process has no index, and torch warns about that.
        "device_id": row(device.type).current() if device.type != "cpu" and device.index is None else device,
        "device_mesh": mesh,
    }


def _mesh(accelerator: Run, strategy: Any) -> "DeviceMesh | None":
    """Return the mesh of replicas and shards; None for one group of all ranks."""
    layout = accelerator.parallelism_config
    if layout is not None and accelerator.torch_device_mesh is not None and layout.dp_shard_cp_dim_names:
        return shard_mesh(layout, accelerator.torch_device_mesh)
    if not strategy.name.startswith(("HYBRID", "_HYBRID")):
        return None
    # A copy on each machine, unless a mesh says otherwise.
    from torch.distributed.device_mesh import init_device_mesh

    check_backend(accelerator.device)
    world = torch.distributed.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    if world % local:
        raise ValueError(
            f"sharding_strategy={strategy.name} keeps a copy on each machine, but the {world} processes are not a multiple of "
            f"the {local} on this one. Start equally many on each, or give a ParallelismConfig(dp_replicate_size, dp_shard_size)."
        )
    shape, names = (world // local, local), ("dp_replicate", "dp_shard")
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)


def _send_states(model: nn.Module, initialise: Any) -> None:
    """Give all ranks the parameters and buffers that rank 0 has; a rank that has them on the meta device gets memory first."""
    for module in model.modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if initialise is not None and any(tensor.is_meta for tensor in tensors):
            initialise(module)
    for tensor in (*model.parameters(), *model.buffers()):
        consistency.take_from_first(tensor, tensor.device)


@contextlib.contextmanager
def _standing_in(model: nn.Module, ignored: list[nn.Parameter]) -> Iterator[None]:
    """Replace a model's parameters by new ones with the same memory, and empty the old; undo it after an error.

    Torch frees the flattened parameters, unit by unit, unless something else refers to them, as earlier optimizers do.
    """
    kept = {id(parameter) for parameter in ignored}
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if type(old) is not nn.Parameter or id(old) in kept:
                continue
            if old not in stand_ins:
                stand_ins[old] = nn.Parameter(old.detach(), old.requires_grad)
                stand_ins[old].__dict__.update(old.__dict__)
            module._parameters[name] = stand_ins[old]
    for old in stand_ins:
        old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    try:
        yield
    except BaseException:
        former = {new: old for old, new in stand_ins.items()}
        for module in model.modules():  # torch removed the parameters that it flattened
            for name, new in module._parameters.items():
                if new in former:
                    former[new].data, module._parameters[name] = new.data, former[new]
        raise


def _repoint_flat(accelerator: Run, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Let optimizers made before follow into the flat parameters."""
    moved, seen = accelerator.prepared.moved, set()
    for name, flat in named(model).items():
        prefix = name.rpartition(".")[0]
        members = member_names(flat)
        for member in members if members is not None else [name.rpartition(".")[2]]:
            full = f"{prefix}.{member}" if prefix else member
            old = before.get(full)
            if old is not None and old is not flat and id(old) not in seen:
                seen.add(id(old))
                moved.record(full, old, flat)
    for optimizer in accelerator._optimizers:
        moved.follow(optimizer.optimizer)


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Return a `param_init_fn` that keeps tied weights tied.

    Moving modules off the meta device one at a time gives each its own copy of a weight that they share.

    Args:
        param_init_fn: materialises the parameters that a module holds directly.
        model: the model with its ties, before initialisation.
        device: the target of the parameters.

    Returns:
        `param_init_fn` itself if no weight is shared, else a function that also restores the ties.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    places = [[name.rpartition(".") for name in names] for _, names in ties(model)]
    group_of = {(modules[owner], entry): group for group, names in enumerate(places) for owner, _, entry in names}
    if not group_of:
        return param_init_fn
    shared: dict[int, nn.Parameter] = {}

    def init_and_retie(module: nn.Module) -> nn.Module:
        param_init_fn(module)
        parameters: list[tuple[str, Any]] = list(module._parameters.items())
        for name, parameter in parameters:
            if (group := group_of.get((module, name))) is None:
                continue
            if group not in shared and parameter.device.type != torch.device(device).type:
                parameter = nn.Parameter(parameter.to(device), requires_grad=parameter.requires_grad)
            module._parameters[name] = shared.setdefault(group, parameter)
        return module

    return init_and_retie
