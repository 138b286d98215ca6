"""Questions to the device mesh: which ranks belong together, and where this rank stands among them."""

import warnings
from typing import TYPE_CHECKING, Any

import torch

from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.master import local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def submesh(mesh: "DeviceMesh | None", name: str) -> "DeviceMesh | None":
    """Return one dimension of a mesh, a flattened one ("dp_shard_cp") included; None where it is not active."""
    if mesh is None:
        return None
    if name in (mesh.mesh_dim_names or ()):
        return mesh[name]
    # Slicing a flattened dimension out of its root warns since torch 2.11; the mesh itself keeps it under this name.
    flattened = getattr(mesh, "_flatten_mapping", None)
    if flattened is not None:
        return flattened.get(name)
    try:
        return mesh[name]
    except KeyError:
        return None


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
    if not replicas:
        return submesh(mesh, "dp_shard_cp")
    with warnings.catch_warnings():
        # There is no other public way to put a dimension before a flattened one.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[(*replicas, "dp_shard_cp")]


@torch.no_grad()
def take_from_first(tensor: torch.Tensor, device: torch.device, group: Any = None) -> None:
    """Give a tensor (not a meta one) the values that the first rank of a group has. All ranks of the group."""
    local = local_part(tensor).detach()
    if tensor.is_meta or not local.numel():
        return
    sent = local.to(device).contiguous()
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
    torch.distributed.broadcast(sent, src=first, group=group)
    if sent.data_ptr() != local.data_ptr():
        local.copy_(sent)
