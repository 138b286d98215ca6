"""The data plan: who gets which part of the data, how many samples that are, and how many samples of a round are real.

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


@dataclass(frozen=True)
class ShardPlan:
    """What one shard holds in an epoch. Numbers that cannot be told beforehand are None.

    Args:
        index: number of the shard, from 0.
        ranks: the processes that receive it; several where a device mesh spreads one model replica over them.
        samples: different samples of the dataset in it.
        duplicates: samples from the beginning of the data that complete its last batch.
        batches: batches that each of its ranks receives, so the steps of an epoch.
        read: part of the whole data that each of its ranks reads, from 0.0 to 1.0.
        pieces: which pieces of the stream it reads, in the order of the stream; None where that is not how it is divided.
    """

    index: int
    ranks: tuple[int, ...]
    samples: int | None = None
    duplicates: int | None = None
    batches: int | None = None
    read: float | None = None
    pieces: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DataPlan:
    """Who reads what of a prepared loader; `str()` of it is a table. Numbers that cannot be told beforehand are None.

    Args:
        kind: "map-style", or "stream" for an iterable dataset.
        reading: how it is read, one of the constants of this module.
        process_index: the process that the plan was made in.
        shard_index: the shard of that process.
        shards: one entry for each different part of the data.
        dataset_length: samples in the dataset.
        samples: samples that an epoch uses, over all shards, each counted once; `duplicates` come on top.
        duplicates: samples that all shards together see a second time in an epoch, to complete the last round.
        dropped: samples that the sampler draws in an epoch but nobody receives, because of `drop_last`.
        batch_size: samples in a batch of one process.
        total_batch_size: samples that all processes together receive in a step.
        workers: worker processes of each process that reads.
        sampler: kind of the sampler that decides the order, or of the batch sampler if it has none; None for a stream.
        drop_last: an incomplete last round is dropped.
        pieces: pieces that a stream is stored in, where it tells.
        uneven: shards may end at different steps, so the processes agree in every step on whether all have a batch.
    """

    kind: str
    reading: str
    process_index: int
    shard_index: int
    shards: tuple[ShardPlan, ...]
    dataset_length: int | None = None
    samples: int | None = None
    duplicates: int | None = None
    dropped: int | None = None
    batch_size: int | None = None
    total_batch_size: int | None = None
    workers: int = 0
    sampler: str | None = None
    drop_last: bool = False
    pieces: int | None = None
    uneven: bool = False

    @property
    def own(self) -> ShardPlan:
        """The shard of the process that the plan was made in."""
        return self.shards[self.shard_index]

    @property
    def summary(self) -> str:
        """The plan in one line, without the single shards."""
        count = len(self.shards)
        line = f"{self.kind}, {self.reading}; {_known(self.dataset_length)} samples, {_counted(count, 'shard')}"
        if self.sampler:
            line += f", order by {self.sampler}"
        if self.samples is not None:
            line += (
                f"; an epoch uses {self.samples}, with {_known(self.duplicates)} duplicates, {self.dropped} dropped"
            )
        if self.batch_size is not None:
            line += f"; batches of {self.batch_size} per process, {self.total_batch_size} in total"
        if self.workers:
            line += f"; {_counted(self.workers, 'worker process', 'es')} each"
        if self.reading == EVERYTHING and self.pieces is not None and self.pieces < len(self.shards):
            line += f"; the stream is stored in {_counted(self.pieces, 'piece')}, too few to give each shard pieces of its own"
        if self.kind == "stream" and self.workers > 1 and self.pieces is None:
            line += (
                f"; each of the {self.workers} workers iterates over the stream, which has to divide itself among them "
                "by torch.utils.data.get_worker_info()"
            )
        return line + ("; all processes stop when the first shard ends" if self.uneven else "")

    def __str__(self) -> str:
        facts = [
            ("data", f"{self.kind}, {_known(self.dataset_length)} samples"),
            ("read", self.reading),
            ("order", self.sampler or "that of the stream"),
            (
                "epoch",
                f"{_known(self.samples)} samples, {_known(self.duplicates)} duplicates, "
                f"{_known(self.dropped)} dropped",
            ),
            ("batch", f"{_known(self.batch_size)} per process, {_known(self.total_batch_size)} in total"),
            ("workers", f"{self.workers} per process"),
        ]
        if self.uneven:
            facts.append(("end", "all processes stop when the first shard ends"))
        lines = [f"{name:<8} {value}" for name, value in facts]
        rows = [("shard", "ranks", "samples", "duplicates", "batches", "reads")]
        rows += [None if shard is None else _row(shard) for shard in _some(self.shards)]
        widths = [max(len(row[column]) for row in rows if row) for column in range(len(rows[0]))]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)] if row else ["..."]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


OWN_SHARD = "own shard by index"
BY_PIECES = "by pieces"
SPLIT_ALREADY = "split by node already"
EVERYTHING = "reads everything, keeps its part"
DISPATCHED = "main process reads and sends"

# A table of a large run shows its ends only.
_LARGEST_TABLE = 16


def shards_of(samples: int, size: int, shards: int, *, drop_last: bool, fill: str) -> list[tuple[int, int, int]]:
    """Work out what each shard holds when whole rounds of batches are dealt out in turn.

    Args:
        samples: samples that are dealt out.
        size: batch size of a shard.
        shards: number of shards.
        drop_last: drop a last round that is not complete.
        fill: what else becomes of it: "batches" completes it to full batches, "round" only until all shards hold equally
            many, "nothing" leaves shards with a smaller batch, or none.

    Returns:
        For each shard the samples, the duplicates and the batches.

    Example:
        >>> shards_of(10, size=3, shards=2, drop_last=False, fill="batches")
        [(6, 0, 2), (4, 2, 2)]
    """
    rounds, rest = divmod(samples, size * shards)
    if drop_last or not rest:
        return [(rounds * size, 0, rounds)] * shards
    width = -(-rest // shards) if fill == "round" else size
    result = []
    for real in real_per_shard(rest, width, shards):
        filled = width if fill != "nothing" else real
        result.append((rounds * size + real, filled - real, rounds + (filled > 0)))
    return result


def pieces_of(count: int, shards: int) -> list[tuple[int, ...]]:
    """Divide so many pieces among shards, in order; the first shards get one more where it does not come out even.

    Example:
        >>> pieces_of(5, 2)
        [(0, 1, 2), (3, 4)]
    """
    each, rest = divmod(count, shards)
    starts = [shard * each + min(shard, rest) for shard in range(shards + 1)]
    return [tuple(range(start, stop)) for start, stop in zip(starts, starts[1:], strict=False)]


def _known(value: Any | None) -> str:
    return "unknown" if value is None else str(value)


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _row(shard: ShardPlan) -> tuple[str, ...]:
    reads = "unknown" if shard.read is None else f"{100 * shard.read:.3g}%"
    if shard.pieces is not None:
        reads += f", pieces {_numbers(shard.pieces)}"
    numbers = (shard.samples, shard.duplicates, shard.batches)
    return str(shard.index), _numbers(shard.ranks), *map(_known, numbers), reads


def _numbers(values: tuple[int, ...]) -> str:
    """Write numbers as `0-3` where they follow each other, else as `0, 2`."""
    if len(values) > 2 and values == tuple(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ", ".join(map(str, values))


def _some(shards: tuple[ShardPlan, ...]) -> list[ShardPlan | None]:
    if len(shards) <= _LARGEST_TABLE:
        return list(shards)
    half = _LARGEST_TABLE // 2
    return [*shards[:half], None, *shards[-half:]]
