"""Which part of the data each process reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

# Mesh dimensions along which one model replica is spread: their ranks work together on the same samples.
SHARED_DATA_DIMS = frozenset({"tp", "cp", "sp", "pp"})


@dataclass(frozen=True)
class ShardLayout:
    """Which of how many data shards (`num_shards`, at most the number of processes) this process reads."""

    num_shards: int
    shard_index: int

    @classmethod
    def of_all(cls, num_processes: int, mesh: Any | None = None) -> list[ShardLayout]:
        """Return each process's shard; ranks that differ only along `tp`, `cp`, `sp` or `pp` of the mesh share one."""
        if mesh is None:
            return [cls(num_processes, rank) for rank in range(num_processes)]
        names, ranks = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()
        times = Counter(ranks)
        odd = next((rank for rank in range(num_processes) if times[rank] != 1), None)
        if not names or odd is not None:
            raise ValueError(
                f"torch_device_mesh has the dimension names {names} and holds process {odd or 0} {times[odd or 0]} times, so it is "
                "not known which ranks share their data. Build the mesh over all processes, with mesh_dim_names=(...)."
            )
        num_shards, shards = 1, torch.zeros_like(mesh.mesh)
        for dim, (name, size) in enumerate(zip(names, mesh.mesh.shape, strict=True)):
            if name not in SHARED_DATA_DIMS:
                num_shards *= size
                shards = shards * size + torch.arange(size).view(size, *[1] * (mesh.mesh.dim() - dim - 1))
        of_rank = dict(zip(ranks, shards.flatten().tolist(), strict=True))
        return [cls(num_shards, of_rank[rank]) for rank in range(num_processes)]
