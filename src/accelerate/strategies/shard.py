"""Sharding a model in place with torch's `fully_shard`: which modules become units, and where their weights come from."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.base.versions import is_torch_version
from accelerate.modules import tensor_kinds
from accelerate.modules.optimizer_remap import named, remap_optimizers, tie, ties
from accelerate.modules.unwrap import canonical_name, get_module_children_bottom_up
from accelerate.precision import master
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run
from accelerate.runtime.torch_private import box, local_part
from accelerate.strategies.mesh import check_backend, ranks_of_experts, shard_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


logger = logging.getLogger(__name__)

# Torch cannot gather the parameters of a container at its forward, because it has none.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a module out of its compiled shell, or to one in it.

    Not a collective.
    """
    return next(roots(model), None) is not None


def roots(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that `fully_shard` was applied to: the model, or what adapters wrap.

    Not a collective.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        yield model
        return
    for child in model.children():
        yield from roots(child)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter, scale of a quantised one and buffer once, also those that a state dict omits."""
    scales = tensor_kinds.of_model(model)
    named = *model.named_parameters(), *scales.items(), *model.named_buffers()
    return {canonical_name(name): tensor for name, tensor in named}


def mesh_of(accelerator: Run) -> "DeviceMesh":
    """Return the mesh that parameters are sharded over; without a configuration, all ranks.

    Collective: call on every rank.
    """
    layout, mesh = accelerator.parallelism_config, accelerator.torch_device_mesh
    if mesh is not None:
        return shard_mesh(layout, mesh)  # type: ignore[arg-type]  # the mesh is built from a layout
    from torch.distributed.device_mesh import init_device_mesh

    check_backend(accelerator.device)
    shape = (torch.distributed.get_world_size(),)
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_shard",))


def units(
    model: nn.Module, is_unit: Callable[[nn.Module], bool] | None, ruled: Collection[nn.Module] = ()
) -> list[nn.Module]:
    """Return the modules that are sharded separately, inner ones first, without the model itself.

    A module that shares a parameter with a module outside it is no unit: the parameter would be sharded twice, and the tie
    lost. A module whose parameters are all in inner units is no unit either. Modules in `ruled` have their own precision, and
    are always units; ValueError if one shares a parameter.
    """
    if is_unit is None and not ruled:
        return []
    holders = _holders(model)
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    chosen_units: list[nn.Module] = []
    covered: set[int] = set()
    for name, module in reversed(list(model.named_modules())):
        # A wrapper that recomputes activations is around a unit, and is no unit itself.
        around = isinstance(module, torch_private.ActivationWrapper)
        chosen = module in ruled or (is_unit is not None and is_unit(module))
        if not name or around or isinstance(module, CONTAINERS) or not chosen:
            continue
        inside = _holders(module)
        if any(count * places[id(module)] < holders[key] for key, count in inside.items()):
            if module in ruled:
                raise ValueError(
                    f"module_precision matches {name!r}, which shares a parameter with another part of the model."
                )
            logger.info("%s shares a parameter with another part of the model and is sharded together with it.", name)
        elif module in ruled or any(p.numel() and id(p) not in covered for p in module.parameters()):
            chosen_units.append(module)
            covered |= inside.keys()
    return chosen_units


def _holders(model: nn.Module) -> Counter[int]:
    """Return in how many places each parameter is; a module that is in several counts in each."""
    return Counter(
        id(parameter)
        for _, module in model.named_modules(remove_duplicate=False)
        for parameter in module._parameters.values()
        if parameter is not None
    )


def shard(
    accelerator: Run,
    model: nn.Module,
    is_unit: Callable[[nn.Module], bool] | None,
    ignored: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard a model in place, let its optimizers follow, and return it.

    With `cpu_ram_efficient_loading` only rank 0's weights count, and the others' may be on the meta device. Raises
    ValueError if weights are on the meta device and nothing says where they come from, or if the ranks' models differ.

    Collective: call on every rank.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    plugin = accelerator.state.fsdp_plugin
    offloads = accelerator.device.type != "cpu" and isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    if accelerator.mixed_precision != "no" and master.upcast(model) and is_torch_version("<", "2.8"):
        master.upcast_frozen(model)  # its `fully_shard` takes one dtype in a unit, that of frozen weights included
    policies: dict[nn.Module, Any] = {}
    ruled: set[nn.Module] = set()
    for sharding in accelerator.extensions.sharding:
        sharding(model, ignored or (), policies, ruled)
    if plugin.module_precision and not policies:
        raise ValueError("module_precision needs an extension that is not in this installation of accelerate.")
    experts: list[Any] = experts_of(accelerator, model)  # `fully_shard` adds methods
    around = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    parts = units(model, is_unit, ruled - {*experts})
    before = named(model)
    tied = ties(model)
    weights = _take_weights(model) if plugin.cpu_ram_efficient_loading else None
    options: dict[str, Any] = {
        "mesh": mesh_of(accelerator),
        "offload_policy": plugin.cpu_offload if offloads else OffloadPolicy(),
    }
    if plugin.reshard_after_forward is not True:
        # Otherwise torch's default holds: the model's own part, which backward needs first, stays gathered.
        options["reshard_after_forward"] = plugin.reshard_after_forward
    if ignored:
        # By name: weights that only rank 0 keeps have left new parameters behind.
        kept = {name for name, parameter in before.items() if parameter in ignored}
        options["ignored_params"] = {parameter for name, parameter in named(model).items() if name in kept}
    if is_unit is not None and not parts:
        logger.warning(
            f"The auto_wrap_policy chooses no module of {type(model).__name__}, so the full model is one unit, gathered at "
            "once. Name the class of its repeated layer in transformer_cls_names_to_wrap."
        )
    layout: Any = accelerator.parallelism_config  # with an `expert_mesh`, where there are experts
    for part in experts:
        fully_shard(part, **{**options, "mesh": layout.expert_mesh, "mp_policy": policies.get(part, around)})
        part.set_gradient_divide_factor(float(layout.data_parallel_size))
        if layout.expert_mesh["efsdp"].size() > 1:
            # Gloo has no reduction that divides by another number than the ranks; over one rank torch divides itself.
            part.set_force_sum_reduction_for_comms(True)
    for part in [*parts, model]:
        original = _list_parameters(part)
        fully_shard(part, **options, mp_policy=policies.get(part, around))
        _free_replaced(original)
    if weights is not None:
        allocate(model, accelerator.device, offloads)
        tie(model, tied)
        distribute(accelerator, model, weights)
    else:
        _leave_meta(model, plugin.param_init_fn)
    _gather_ahead(model, plugin)
    for sharded in accelerator.extensions.sharded:
        sharded(model)
    remap_optimizers(accelerator, model, before)
    return model


def _gather_ahead(model: nn.Module, plugin: Any) -> None:
    """Let each unit gather as many of those after it as the plugin says, as its forward or backward begins."""
    if not plugin.forward_prefetch and not plugin.backward_prefetch:
        return
    sharded = torch_private.sharded_units(model)
    # Backward reaches a unit before its inner units, and the last inner unit first.
    last_first = [part for part in dict.fromkeys(reversed(get_module_children_bottom_up(model))) if part in sharded]
    ways = ("forward", plugin.forward_prefetch, sharded), ("backward", plugin.backward_prefetch, last_first)
    for way, depth, order in ways:
        for place, part in enumerate(order if depth else ()):
            getattr(part, f"set_modules_to_{way}_prefetch")(order[place + 1 : place + 1 + depth])


def experts_of(accelerator: Run, model: nn.Module) -> list[nn.Module]:
    """Return the modules whose experts `prepare` has spread over ranks. Not a collective."""
    spread = getattr(accelerator.parallelism_config, "expert_mesh", None) is not None
    return [module for module in model.modules() if ranks_of_experts(module)] if spread else []


def _leave_meta(model: nn.Module, initialise: Callable[[nn.Module], Any] | None) -> None:
    """Give modules on the meta device memory and values by the plugin's `param_init_fn`."""

    def on_meta(module: nn.Module, recurse: bool) -> list[str]:
        tensors = *module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)
        return [name for name, tensor in tensors if tensor.is_meta]

    if initialise is not None:
        for module in model.modules():
            if on_meta(module, recurse=False):
                initialise(module)
    if without_values := on_meta(model, recurse=True):
        raise ValueError(
            f"{len(without_values)} tensors are on the meta device, {without_values[0]!r} for one, and nothing says what their values are. Load "
            "weights on rank 0 and set cpu_ram_efficient_loading=True, or give the plugin a param_init_fn that makes them."
        )


def _list_parameters(module: nn.Module) -> list[tuple[tuple[nn.Module, str], nn.Parameter]]:
    entries = [(part, *item) for part in module.modules() for item in part._parameters.items()]
    return [((part, name), parameter) for part, name, parameter in entries if parameter is not None]


def _free_replaced(original: list[tuple[tuple[nn.Module, str], nn.Parameter]]) -> None:
    """Free the unsharded tensors that shards replaced: optimizers made before still refer to them."""
    for (module, name), old in original:
        if module._parameters.get(name) is not old:
            torch_private.free(old)


# -- weights that only rank 0 has ------------------------------------------------------------------------------------


def allocate(model: nn.Module, device: torch.device, offloads: bool) -> None:
    """Give a sharded model memory, off the meta device; with `offloads` its shards in host memory.

    Not a collective.
    """
    from torch.distributed.tensor import DTensor

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu" if offloads and isinstance(tensor, DTensor) else device)

    model._apply(filled)  # as `to_empty` does, which knows one device


def _take_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move a model to the meta device, in place, and return rank 0's tensors; the other ranks' are dropped."""
    main = torch.distributed.get_rank() == 0
    weights = {name: tensor.detach() for name, tensor in tensors_of(model).items()} if main else {}
    if missing := _from_main([name for name, tensor in weights.items() if tensor.is_meta]):
        raise ValueError(
            f"cpu_ram_efficient_loading=True sends the weights of rank 0 to the others, but {len(missing)} of them are on the "
            f"meta device there, {missing[0]!r} for one. Load the weights on rank 0."
        )
    original, tied = _list_parameters(model), ties(model)
    for (module, name), parameter in original:
        module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    _free_replaced(original)
    tie(model, tied)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")
    return weights


def distribute(
    accelerator: Run, model: nn.Module, weights: Mapping[str, torch.Tensor], optional: Collection[str] = ()
) -> None:
    """Give a sharded model the tensors of rank 0, each rank only its shards; else RuntimeError.

    Collective: call on every rank.
    """
    main = torch.distributed.get_rank() == 0
    targets = tensors_of(model)
    absent = {name for name in optional if name not in weights}
    problems = (
        _misfits({name: target for name, target in targets.items() if name not in absent}, weights) if main else []
    )
    absent, problems = _from_main((absent, problems))
    if problems:
        reasons = "; ".join(problems[:5])
        raise RuntimeError(f"Rank 0's weights do not fit {type(model).__name__}; nothing was loaded: {reasons}.")
    for name, target in targets.items():
        if name in absent:
            continue
        sent = torch.empty(target.shape, dtype=target.dtype, device=accelerator.device)
        if main:
            sent.copy_(weights[name])
        torch.distributed.broadcast(sent, src=0)
        local_part(target).detach().copy_(sent[box(target)])


def _from_main(obj: Any) -> Any:
    shared = [obj]
    torch.distributed.broadcast_object_list(shared)
    return shared[0]


def _misfits(targets: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> list[str]:
    shapes = {name: tuple(weights[name].shape) if name in weights else "missing" for name in targets}
    return [
        f"{name} is {shapes[name]} there and {tuple(target.shape)} in the model"
        for name, target in targets.items()
        if shapes[name] != tuple(target.shape)
    ]
