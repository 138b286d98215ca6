"""Questions to the device mesh: which ranks belong together, and where this rank stands among them."""

from typing import TYPE_CHECKING, Any

import torch

from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.master import local_part
from accelerate.runtime import torch_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_backend(device: torch.device) -> None:
    """Refuse (ValueError) meshes of accelerators that meet over gloo, whose gathers of their shards end in a segmentation fault. Any rank.

    Seen on one H200 with torch 2.11: replicas (DDP), sequence parallelism beside them and flat shards of FSDP1 work.
    """
    if device.type != "cpu" and f"{device.type}:gloo" in torch.distributed.get_backend_config().split(","):
        raise ValueError(
            f"backend='gloo' cannot gather what is sharded on {device.type}: torch crashes in its functional collectives. Start one process per "
            "device and leave the backend to its default, train replicas (DDP), or pass cpu=True to Accelerator."
        )


def submesh(mesh: "DeviceMesh | None", name: str) -> "DeviceMesh | None":
    """Return one dimension of a mesh, a flattened one ("dp_shard_cp") included; None where it is not active."""
    if mesh is None:
        return None
    return torch_private.dimension(mesh, name)


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
    return torch_private.dimension(mesh, (*replicas, "dp_shard_cp"))


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
