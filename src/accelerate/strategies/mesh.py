"""The device mesh of a run, its groups of ranks, and this rank's position in them."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.config.strategies import traits_of
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_layout(accelerator: Run) -> None:
    """Refuse shards without a strategy that makes them."""
    layout: ParallelismConfig = accelerator.parallelism_config  # type: ignore[assignment]  # callers have one
    if layout.dp_shard_enabled and not traits_of(accelerator.distributed_type).sharded:
        raise ValueError(
            f"dp_shard_size={layout.dp_shard_size} shards parameters, which needs FSDP, but distributed_type is "
            f"{accelerator.distributed_type}. Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or use "
            f"dp_replicate_size={layout.data_parallel_size} and dp_shard_size=1."
        )


def check_backend(device: torch.device) -> None:
    """Refuse (ValueError) meshes of accelerators that use gloo: gathering their shards ends in a segmentation fault.

    Seen on one H200 with torch 2.11. Replicas (DDP), sequence parallelism with replicas and flat shards of FSDP1 work.

    Not a collective.
    """
    if device.type != "cpu" and f"{device.type}:gloo" in torch.distributed.get_backend_config().split(","):
        raise ValueError(
            f"backend='gloo' cannot gather shards on {device.type}: torch crashes in its functional collectives. Start one process per "
            "device and leave the backend to its default, train replicas (DDP), or pass cpu=True to Accelerator."
        )


def build(accelerator: Run) -> None:
    """Build the device mesh of the parallelism configuration, once."""
    layout = accelerator.parallelism_config
    if layout is not None and accelerator.torch_device_mesh is None:
        layout._validate_accelerator(accelerator)
        if layout.tp_enabled or layout.cp_enabled or layout.pp_enabled or layout.dp_shard_enabled:
            check_backend(accelerator.device)
        accelerator.state.device_mesh = layout.get_device_mesh(accelerator.device.type)


def dimension_rank(accelerator: Run, dimension: str, what: str) -> int:
    """Return this rank's place in a dimension of the mesh, 0 where its size is 1; also before the mesh is built."""
    layout = accelerator.parallelism_config
    if layout is None:
        kind = NotImplementedError if dimension == "cp" else RuntimeError
        raise kind(f"{what} is not configured. Set `parallelism_config` first.")
    if accelerator.torch_device_mesh is not None:
        return rank(accelerator.torch_device_mesh, dimension)
    names, sizes = layout._get_mesh() or ((), ())
    if dimension not in names:
        return 0
    place = names.index(dimension)
    return accelerator.process_index // math.prod(sizes[place + 1 :]) % sizes[place]


def submesh(mesh: "DeviceMesh | None", name: str) -> "DeviceMesh | None":
    """Return one dimension of a mesh, a flattened one ("dp_shard_cp") included; None where it is not active."""
    if mesh is None:
        return None
    part: DeviceMesh | None = torch_private.dimension(mesh, name)
    return part


def rank(mesh: "DeviceMesh | None", name: str) -> int:
    """Return this rank's place in a dimension; 0 when it is not active."""
    part = submesh(mesh, name)
    return 0 if part is None else part.get_local_rank()


def shard_mesh(config: ParallelismConfig, mesh: "DeviceMesh") -> "DeviceMesh":
    """Return the mesh that parameters are sharded over: shards, with replicas before them if there are any."""
    shards = tuple(config.dp_shard_cp_dim_names)
    replicas = tuple(config.dp_dim_names[:1]) if config.dp_replicate_enabled else ()
    if len(shards) == 1:
        return mesh[(*replicas, *shards)]
    names: str | tuple[str, ...] = (*replicas, "dp_shard_cp") if replicas else "dp_shard_cp"
    sharded: DeviceMesh = torch_private.dimension(mesh, names)
    return sharded


def ranks_of_experts(module: nn.Module) -> int:
    """Return over how many ranks the experts of a module are spread; 0 if it has none that are.

    Not a collective.
    """
    parameters: Iterable[Any] = module._parameters.values()
    meshes = [value.device_mesh for value in parameters if hasattr(value, "device_mesh")]
    names = next((mesh.mesh_dim_names for mesh in meshes if "ep" in (mesh.mesh_dim_names or ())), ())
    return next(mesh.size(names.index("ep")) for mesh in meshes if mesh.mesh_dim_names == names) if names else 0
