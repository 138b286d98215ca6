"""torch's private names that the core, or several extensions, use.

No other file uses such names but `launch.torch_compat` and the ``torch_private.py`` of an extension, for names that it alone uses.

A release may drop any of these names. Functions ask whether a name exists, and fall back on an alternative. Names in
`_HOMES` are imported on first use: a torch without the name loses the feature, and the rest works.

Seen on: torch 2.7.1, 2.9.1, 2.13.0, 2.14.1, 2.15.0 (`make test-versions`).
"""

import contextlib
import math
import operator
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# By the place in torch, names that are read there, with an underscore before them where torch has one.
_HOMES = {
    "torch": "neg_view",
    "torch.Tensor": "make_subclass",
    "torch._C": "DisableTorchFunction",
    # The operator itself: torch's own context parallelism replaces the name in `torch.nn.functional` for a time.
    "torch._C._nn": "scaled_dot_product_attention",
    "torch._utils": "take_tensors flatten_dense_tensors unflatten_dense_tensors",
    "torch.autograd.Variable": "execution_engine",
    "torch.distributed._functional_collectives": "all_reduce all_to_all_single_autograd wait_tensor",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": (
        "ActivationWrapper apply_activation_checkpointing checkpoint_wrapper offload_wrapper"
    ),
    "torch.distributed.checkpoint._nested_dict": "unflatten_state_dict",
    "torch.distributed.checkpoint.filesystem": "StorageInfo",
    "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset",
    "torch.distributed.tensor.experimental._attention": "cp_options set_rotate_method",
    "torch.nn.modules.module": "EXTRA_STATE_KEY_SUFFIX IncompatibleKeys",
    "torch.utils": "pytree",
    "torch.utils._python_dispatch": "TorchDispatchMode",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = pkgutil.resolve_name(_HOME_OF[name])
        value = globals()[name] = getattr(home, name) if hasattr(home, name) else getattr(home, f"_{name}")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no {name} in {_HOME_OF[name]}, which this feature of accelerate needs. It was last "
            "seen in torch 2.15.0: install that, or a newer accelerate."
        ) from error
    return value


# -- process groups ----------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def groups() -> list[Any]:
    """Return this rank's process groups; none where torch does not list them."""
    world = getattr(dist.distributed_c10d, "_world", None) if dist.is_available() else None
    return list(getattr(world, "pg_map", ()))


def backends(group: Any) -> Iterator[Any]:
    """Yield what carries out the collectives of a group, by kind of device; nothing where torch does not say."""
    for device in getattr(group, "_device_types", ()):
        yield group._get_backend(device)


def collectives_started(backend: Any) -> int:
    """Return how many operations a backend has started; RuntimeError or AttributeError if it does not count."""
    return backend._get_sequence_number_for_group()


def live_timeout() -> timedelta | None:
    """Return how long collectives of the live process group may wait, or None if torch does not say."""
    options = (getattr(backend, "options", None) for backend in backends(dist.group.WORLD))
    return next((option._timeout for option in options if hasattr(option, "_timeout")), None)


def set_live_timeout(timeout: timedelta) -> bool:
    """Change how long collectives of the live process group may wait; return whether torch could."""
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is None:
        return False
    change(timeout, dist.group.WORLD)
    return live_timeout() in (timeout, None)


def is_fake(group: Any = None) -> bool:
    """Return whether a process group is torch's fake one, whose other ranks do not exist."""
    return dist.get_backend(group) == "fake"


def pickle_and_offsets(path: str) -> tuple[bytes, Callable[[str], int]]:
    """Return the pickle in a file of torch's format, and what tells where a record begins in the file; an error for other files."""
    reader = torch._C.PyTorchFileReader(path)
    order = reader.get_record("byteorder") if reader.has_record("byteorder") else b"little"
    if order != sys.byteorder.encode():
        raise ValueError(f"{path} has the byte order of another machine")
    return reader.get_record("data.pkl"), reader.get_record_offset


def is_shape(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made in `shapes_only`."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


# -- meshes and DTensors -----------------------------------------------------------------------------------------------


def flatten(mesh: Any, dimensions: Mapping[str, Sequence[str]]) -> None:
    """Let a new mesh know several of its dimensions as one, under separate names; names without dimensions are skipped."""
    # Up to 2.9 torch keeps them by the mesh's shape, with groups of a former process group.
    resources = getattr(torch.distributed.device_mesh, "_mesh_resources", None)
    for kept in ("root_to_flatten_mapping", "flatten_name_to_root_dims"):
        getattr(resources, kept, {}).pop(mesh, None)
    for name, names in dimensions.items():
        if names:
            mesh[tuple(names)]._flatten(name)


def dimension(mesh: Any, names: str | Sequence[str]) -> Any:
    """Return dimensions of a mesh, flattened ones included; None where it has them not."""
    # Slicing a flattened dimension out of its root warns since torch 2.11; the mesh itself keeps it under its name.
    kept = getattr(mesh, "_flatten_mapping", {})
    if names in kept:
        return kept[names]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        try:
            return mesh[names]
        except KeyError:
            return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the local shard of a DTensor, else the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Set `data`; for a DTensor also the local tensor and its description, which torch would not change."""
    tensor.data = value
    if hasattr(value, "_local_tensor"):
        tensor._local_tensor, tensor._spec = value._local_tensor, value._spec  # type: ignore[attr-defined]


def free(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor, or of a DTensor's shard."""
    if hasattr(tensor, "_local_tensor"):
        tensor._local_tensor = torch.empty(0, dtype=tensor.dtype)
    else:
        tensor.data = tensor.detach().new_empty(0)  # of the same class


def group_of(sharded: Any) -> Any:
    """Return the process group of a ShardedTensor."""
    return sharded._process_group


def gathering_device(sharded: Any) -> torch.device:
    """Return where a ShardedTensor is gathered."""
    return sharded._get_preferred_device()


def own_state(module: nn.Module, prefix: str) -> dict[str, Any]:
    """Return the entries of a state dict that a module adds, under its name, without those of the modules in it."""
    entries: dict[str, Any] = {}
    module._save_to_state_dict(entries, f"{prefix}." if prefix else "", keep_vars=False)
    return entries


def box(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return which part of the full tensor this rank has; torch computes it for every kind of placement."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return ()
    compute = __getattr__("compute_local_shape_and_global_offset")
    shape, offset = compute(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(map(slice, offset, map(operator.add, offset, shape)))


# -- fully_shard -------------------------------------------------------------------------------------------------------


def shard_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that `fully_shard` gathers and reduces together."""
    for module in model.modules():
        if (state := getattr(module, "_get_fsdp_state", None)) is not None:
            groups = getattr(state(), "_fsdp_param_groups", None)
            # Up to 2.9 a module has one group, or None.
            yield from filter(None, [getattr(state(), "_fsdp_param_group", None)]) if groups is None else groups


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `fully_shard` was applied to."""
    return [part for part in model.modules() if hasattr(type(part), "_get_fsdp_state")]


@contextlib.contextmanager
def unsharded(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the parameters that `fully_shard` has sharded in modules, and keep them unsharded through forwards.

    Collective: call on every rank.
    """
    with contextlib.ExitStack() as last:
        for root in roots:
            root._get_fsdp_state()._lazy_init()  # decides the root's behaviour after a forward
            for group in list(shard_groups(root)):
                last.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
                group.post_forward_mesh_info = None  # as `set_reshard_after_forward(False)` does
        for unit in [part for root in roots for part in sharded_units(root)]:
            last.callback(unit.reshard)
            unit.unshard()
        yield


def sharded_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, dict[str, Any], list[torch.Tensor]]]:
    """Yield `fully_shard`'s parameters: a shard, its sizes and dtypes while gathered, and this rank's unsharded gradients."""
    for group in shard_groups(model):
        for item in getattr(group, "fsdp_params", ()):
            shard = item.sharded_param
            policy = getattr(item, "mp_policy", None) or getattr(group, "mp_policy", None)
            compute = getattr(policy, "param_dtype", None) or shard.dtype
            reduce = getattr(policy, "reduce_dtype", None)
            # While nothing is exchanged, gradients add up in the dtype of the exchange; since 2.15 in the shard's if none was requested.
            unreduced = reduce or (shard.dtype if hasattr(type(item), "unsharded_grad_dtype") else compute)
            details = {"whole": math.prod(getattr(item, "_orig_size", shard.shape)), "compute": compute}
            whole = getattr(item, "_unsharded_param", None)
            gradients = (getattr(item, "unsharded_accumulated_grad", None), getattr(whole, "grad", None))
            distinct = {id(gradient): gradient for gradient in gradients if gradient is not None}
            yield shard, {**details, "reduce": reduce or compute, "unreduced": unreduced}, list(distinct.values())


def acts_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether a hook acts in backward as soon as a parameter's gradient is computed, such as its update."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def shards_own_class(model: nn.Module) -> type:
    """Return the class of a module that the user wrote: `fully_shard` derives one from it."""
    return type(model).__bases__[-1] if hasattr(model, "_get_fsdp_state") else type(model)


# -- FullyShardedDataParallel ------------------------------------------------------------------------------------------


def is_wrap_policy(policy: Any) -> bool:
    """Return whether a policy is an object of torch's, such as `ModuleWrapPolicy`."""
    return hasattr(policy, "_run_policy")


def chosen_modules(policy: Any, model: nn.Module) -> set[nn.Module]:
    """Return the modules that such a policy chooses."""
    return set(policy._run_policy(model, set(), {}))


def forget_named_models() -> None:
    """Let torch 2.7 forget the models whose names it looked up for a state dict: it keeps each until the program ends."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    getattr(getattr(module, "_get_fqns", None), "cache_clear", bool)()


def flat_gradients(module: nn.Module) -> list[Any]:
    """Return the gradients, or None, that the flat parameter of a module holds."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    return [getattr(flat, name, None) for name in ("grad", "_saved_grad_shard")]


def flat_parameters(wrapper: nn.Module) -> Iterator[tuple[set[int], dict[str, Any]]]:
    """Yield the parameters that FSDP1 flattened in a wrapper: their ids in `named_parameters`, and their sizes and dtypes."""
    handle = getattr(wrapper, "_handle", None)
    if handle is None:
        return
    flat = handle.flat_param
    originals = flat._params if flat._params is not None else [flat] * len(flat._shapes)
    shown = {id(flat), *map(id, originals), *map(id, getattr(flat, "_shared_params", None) or ())}
    dtype, compute = handle._orig_param_dtype, handle._fwd_bwd_param_dtype
    for name, shape, shard, original in zip(flat._fqns, flat._shapes, flat._shard_param_infos, originals, strict=True):
        count = math.prod(shape)
        yield (
            shown,
            {
                "name": name,
                "dtype": dtype,
                "trainable": original.requires_grad,
                "numel": count,
                "here": (shard.numel_in_shard or 0) if handle.uses_sharded_strategy else count,
                "whole": count,
                "compute": compute,
                "reduce": handle._reduce_dtype,
                "unreduced": compute,  # FSDP1 leaves them as backward computes them
                "gradient": handle._reduce_dtype if handle._keep_low_precision_grads else dtype,
            },
        )


# -- the rest ----------------------------------------------------------------------------------------------------------


def let_batched_power_sgd_run() -> None:
    """Let torch's helper take the single matrix that its batched PowerSGD hook passes (seen on 2.13)."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    batched = getattr(powerSGD_hook, "_orthogonalize", None)
    try:
        if batched is not None:
            batched(torch.eye(2))
    except AssertionError:

        def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
            batched(matrices if matrices.ndim == 3 else matrices.unsqueeze(0), epsilon)

        powerSGD_hook._orthogonalize = orthogonalize
