"""The data plan: who gets which part of the data, and how many samples of a round are real.

A *round* is what all shards together receive in one step: one batch per shard. When the data runs out in the middle of
a round, the round is completed with samples from the beginning of the data, so that every shard takes the same number
of steps. Those duplicates must not count in a metric; `RoundLog` remembers where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Mesh dimensions along which one model replica is spread: their ranks work together on the same samples.
SHARED_DATA_DIMS = frozenset({"tp", "cp", "sp"})


@dataclass(frozen=True)
class ShardLayout:
    """Which of how many data shards this process reads.

    Args:
        num_shards: how many different parts the data is divided into; at most the number of processes.
        shard_index: the part of this process, from 0.
    """

    num_shards: int
    shard_index: int

    @classmethod
    def of(cls, num_processes: int, process_index: int, mesh: Any | None = None) -> ShardLayout:
        """Work out the layout from the process numbers and, if there is one, the device mesh.

        Ranks that differ only along `tp`, `cp` or `sp` hold pieces of one model replica and receive the same batch.

        Args:
            num_processes: number of processes.
            process_index: rank of this process.
            mesh: a `torch.distributed.DeviceMesh` with named dimensions, or None for plain data parallelism.

        Returns:
            The layout of this process.

        Raises:
            ValueError: the mesh has no dimension names or does not contain this process.
        """
        if mesh is None:
            return cls(num_processes, process_index)
        names = mesh.mesh_dim_names
        if not names:
            raise ValueError(
                "torch_device_mesh has no dimension names, so it cannot be told which ranks share their data. "
                "Build it with mesh_dim_names=(...)."
            )
        place = (mesh.mesh == process_index).nonzero()
        if len(place) != 1:
            raise ValueError(
                f"torch_device_mesh holds process {process_index} {len(place)} times; it should hold it once. "
                "Pass the mesh that spans all processes."
            )
        num_shards, shard_index = 1, 0
        for name, size, coordinate in zip(names, mesh.mesh.shape, place[0].tolist(), strict=True):
            if name not in SHARED_DATA_DIMS:
                num_shards, shard_index = num_shards * size, shard_index * size + coordinate
        return cls(num_shards, shard_index)


@dataclass
class RoundLog:
    """Remembers the rounds that were completed with duplicates.

    A sampler writes it while it produces the round; the loader reads it when it yields the batch, which may be several
    batches later when workers read ahead. Rounds are numbered from 0 in every epoch.

    Args:
        padded: round number -> number of real samples at the front of each shard's batch.
    """

    padded: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the last epoch."""
        self.padded.clear()

    def note(self, number: int, real: int, size: int, shards: int) -> None:
        """Record that a round of `shards` batches of `size` samples begins with `real` real samples."""
        self.padded[number] = real_per_shard(real, size, shards)


def real_per_shard(real: int, size: int, shards: int) -> tuple[int, ...]:
    """Number of real samples in each shard's batch, when the real ones come first in the order of the shards.

    Example:
        >>> real_per_shard(real=4, size=3, shards=3)
        (3, 1, 0)
    """
    return tuple(min(max(real - shard * size, 0), size) for shard in range(shards))
