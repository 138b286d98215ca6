"""Questions to the device mesh: which ranks belong together, and where this rank stands among them."""

import warnings
from typing import TYPE_CHECKING

from accelerate.parallelism_config import ParallelismConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def submesh(mesh: "DeviceMesh | None", name: str) -> "DeviceMesh | None":
    """Return one dimension of a mesh, a flattened one included.

    Args:
        mesh: the mesh of `ParallelismConfig.get_device_mesh`; None where there is none.
        name: such as "tp", or a flattened dimension: "dp", "dp_shard_cp", "dp_cp".

    Returns:
        The one-dimensional mesh, or None when the dimension is not active.
    """
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


def size(mesh: "DeviceMesh | None", name: str) -> int:
    """Return how many ranks a dimension has; 1 when it is not active."""
    part = submesh(mesh, name)
    return 1 if part is None else part.size()


def rank(mesh: "DeviceMesh | None", name: str) -> int:
    """Return this rank's place in a dimension; 0 when it is not active."""
    part = submesh(mesh, name)
    return 0 if part is None else part.get_local_rank()


def data_shard(config: ParallelismConfig, mesh: "DeviceMesh | None") -> tuple[int, int]:
    """Return how many shards the data has, and which of them this rank reads.

    Ranks that differ only in tensor, context or sequence parallel dimensions read the same shard.

    Args:
        config: the sizes.
        mesh: their mesh.

    Example:
        >>> data_shard(ParallelismConfig(), None)
        (1, 0)
    """
    return config.data_parallel_size, rank(mesh, "dp")


def shard_mesh(config: ParallelismConfig, mesh: "DeviceMesh") -> "DeviceMesh":
    """Return the mesh that parameters are sharded over: one dimension of shards, with one of replicas before it if there are any.

    Args:
        config: the sizes.
        mesh: their mesh.
    """
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
