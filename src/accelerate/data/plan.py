"""The data plan: who gets which part of the data, and how many samples and steps that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accelerate.base.table import table
from accelerate.data import adapter
from accelerate.data.adapter import batching_sampler, is_stream, known_length
from accelerate.data.samplers import Rounds, has_tensor_order

# Mesh dimensions along which one model replica is spread: their ranks work together on the same samples.
SHARED_DATA_DIMS = frozenset({"tp", "cp", "sp", "pp"})

# How data is read.
OWN_SHARD = "own shard by index"
BY_PIECES = "by pieces"
SPLIT_ALREADY = "divided already, read as it is"
EVERYTHING = "reads everything, keeps its part"
DISPATCHED = "main process reads and sends"


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


@dataclass(frozen=True)
class Division:
    """How the data of a loader is divided: what preparing it has decided, before anything is built.

    Attributes:
        reading: how it is read, one of the constants of this module.
        layouts: the shard of each process.
        split_batches: the loader's batch size is that of all processes together.
        even_batches: the last round is completed.
    """

    reading: str
    layouts: Sequence[ShardLayout]
    process_index: int
    split_batches: bool
    even_batches: bool

    @property
    def own(self) -> ShardLayout:
        """The shard of this process."""
        return self.layouts[self.process_index]


@dataclass(frozen=True)
class ShardPlan:
    """What one shard holds in an epoch. Numbers that are not known beforehand are None.

    Attributes:
        ranks: the processes that receive it; several where a device mesh spreads one model replica over them.
        samples: different samples of the dataset in it; `duplicates` complete its last batch.
        batches: batches that each of its ranks receives, so the steps of an epoch.
        read: part of the whole data that each of its ranks reads, from 0.0 to 1.0.
    """

    index: int
    ranks: tuple[int, ...]
    samples: int | None = None
    duplicates: int | None = None
    batches: int | None = None
    read: float | None = None


@dataclass(frozen=True)
class DataPlan:
    """Who reads what of a prepared loader; `str()` of it is a table. Numbers that are not known beforehand are None.

    Attributes:
        reading: how it is read, one of the constants of this module.
        process_index: the process that the plan was made in; `shard_index` is its shard.
        samples: samples that an epoch uses, over all shards, each counted once; `duplicates` come on top.
        dropped: samples that the sampler draws in an epoch but no process receives, because of `drop_last`.
        total_batch_size: samples that all processes together receive in a step.
        sampler: kind of the sampler that decides the order, or of the batch sampler if it has none; None for a stream.
        walked: each process goes through the batches of all to find its own, because the sampler is not one of torch's.
        uneven: shards may end at different steps, so the processes vote in every step on whether all have a batch.
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
    uneven: bool = False
    walked: bool = False

    @property
    def own(self) -> ShardPlan:
        """The shard of the process that the plan was made in."""
        return self.shards[self.shard_index]

    @property
    def parts(self) -> int:
        """Number of parts that the data came in; 1 where preparing has divided it."""
        return len(self.shards) if self.reading == SPLIT_ALREADY else 1

    @property
    def filled_ends(self) -> tuple[int, ...] | None:
        """Real samples in each shard's last batch, where the user's own sampler has filled up some; else None."""
        if self.reading != SPLIT_ALREADY or not self.duplicates:
            return None
        size = self.own.samples + self.own.duplicates - (self.own.batches - 1) * self.batch_size
        return tuple(size - shard.duplicates for shard in self.shards)

    @property
    def summary(self) -> str:
        """The plan in one line, without the single shards."""
        return f"{len(self.shards)} shards; " + "; ".join(f"{name}: {value}" for name, value in self._facts())

    def __str__(self) -> str:
        rows = []
        for shard in self.shards:
            reads = "unknown" if shard.read is None else f"{100 * shard.read:.3g}%"
            numbers = map(_known, (shard.samples, shard.duplicates, shard.batches))
            rows.append((str(shard.index), ", ".join(map(str, shard.ranks)), *numbers, reads))
        facts = [f"{name:<8} {value}" for name, value in self._facts()]
        return "\n".join([*facts, table(("shard", "ranks", "samples", "duplicates", "batches", "reads"), rows)])

    def _facts(self) -> list[tuple[str, str]]:
        used = [f"{_known(getattr(self, name))} {name}" for name in ("samples", "duplicates", "dropped")]
        facts = [
            ("data", f"{self.kind}, {_known(self.dataset_length)} samples"),
            ("read", self.reading),
            ("order", self.sampler or "that of the stream"),
            ("epoch", ", ".join(used)),
            ("batch", f"{_known(self.batch_size)} per process, {_known(self.total_batch_size)} in total"),
            ("workers", f"{self.workers} per process"),
        ]
        if self.walked:
            facts.append(("find", "each process goes through the batches of all, because the sampler is a custom one"))
        if self.uneven:
            facts.append(("end", "all processes stop when the first shard ends"))
        return facts


def _known(value: Any | None) -> str:
    return "unknown" if value is None else str(value)


def make(dataloader: DataLoader, division: Division) -> DataPlan:
    """Work out who reads what of a loader that is not sharded yet."""
    reading, layouts = division.reading, division.layouts
    count, own, stream = layouts[0].num_shards, division.own.shard_index, is_stream(dataloader)
    batching = batching_sampler(dataloader)
    order = batching.sampler if type(batching) is BatchSampler else batching
    drop_last = bool(dataloader.drop_last or getattr(batching, "drop_last", False))
    total, size = adapter.samples_per_epoch(dataloader), _batch_size(dataloader, batching, reading)
    dealt_out = reading == SPLIT_ALREADY and _is_plain(dataloader, batching) and adapter.deals_out(dataloader, count)
    unseen = reading == SPLIT_ALREADY and not dealt_out  # the other processes' parts
    if size is not None and division.split_batches:
        size //= count
    known: list[tuple[int | None, int | None, int | None]] = [(None, None, None)] * count
    if total is not None and size is not None and _is_plain(dataloader, batching):
        if dealt_out:
            known, total = _dealt_out(adapter.get_sampler(dataloader), size, count, drop_last)
        elif unseen and count > 1:
            [known[own]] = shards_of(total, size, 1, drop_last=drop_last, fill="nothing")
        elif reading != BY_PIECES:  # how many samples a piece holds is known to the stream alone
            # Streams that are divided round by round are always completed.
            fill = "batches" if division.even_batches or stream else "nothing"
            fill = "nothing" if count == 1 else "round" if reading == DISPATCHED else fill
            known = shards_of(total, size, count, drop_last=drop_last, fill=fill)
    parts = {EVERYTHING: [1.0] * count, OWN_SHARD: [1 / count] * count, DISPATCHED: [1.0] + [0.0] * (count - 1)}
    read = [1.0] if count == 1 else parts.get(OWN_SHARD if dealt_out else reading, [None] * count)
    ranks: list[list[int]] = [[] for _ in known]
    for rank, layout in enumerate(layouts):
        ranks[layout.shard_index].append(rank)
    shards = [ShardPlan(shard, tuple(ranks[shard]), *known[shard], read[shard]) for shard in range(count)]
    samples, duplicates, _ = (None if None in column else sum(column) for column in zip(*known, strict=True))
    return DataPlan(
        kind="stream" if stream else "map-style",
        reading=reading,
        process_index=division.process_index,
        shard_index=own,
        shards=tuple(shards),
        dataset_length=None if unseen else known_length(adapter.dataset_length, dataloader.dataset),
        samples=samples,
        duplicates=duplicates,
        dropped=None if samples is None or total is None else total - samples,
        batch_size=size,
        total_batch_size=None if size is None else size * count,
        workers=dataloader.num_workers,
        sampler=adapter.sampler_kind(dataloader),
        drop_last=drop_last,
        uneven=count > 1 and (unseen or reading == BY_PIECES),
        walked=count > 1 and reading == OWN_SHARD and not has_tensor_order(order),
    )


def _dealt_out(sampler: Any, size: int, shards: int, drop_last: bool) -> tuple[list[Any], int]:
    """What each shard holds of a `DistributedSampler`, whose last shards end with a repeated sample; and all its samples."""
    [(taken, _, batches)] = shards_of(len(sampler), size, 1, drop_last=drop_last, fill="nothing")
    samples = len(sampler.dataset)
    repeated = max(0, sampler.total_size - samples) if taken == len(sampler) else 0
    fills = [int(shard >= shards - repeated) for shard in range(shards)]
    return [(taken - fill, fill, batches) for fill in fills], samples


def _is_plain(dataloader: DataLoader, batching: Any) -> bool:
    """Whether batches are cut from the order of the samples as torch's own loader and batch sampler do it."""
    if is_stream(dataloader):  # what each of several workers makes of the stream is not known
        return adapter.iterates_plainly(dataloader) and dataloader.num_workers < 2
    unbatched = dataloader.batch_sampler is None and not isinstance(batching, BatchSampler)
    return adapter.iterates_plainly(dataloader) and (unbatched or type(batching) is BatchSampler)


def _batch_size(dataloader: DataLoader, batching: Any, reading: str) -> int | None:
    size = getattr(batching, "batch_size", None)
    if dataloader.batch_sampler is not None:
        return dataloader.batch_size if size is None else size
    if reading == DISPATCHED:
        return None  # what the dataset gives is a batch of any size
    # Not batched: the sampler gives single indices, unless it is a batch sampler itself.
    return size if isinstance(batching, BatchSampler) else 1


def shards_of(samples: int, size: int, shards: int, *, drop_last: bool, fill: str) -> list[tuple[int, int, int]]:
    """Return samples, duplicates and batches of each shard when rounds of batches are dealt out in turn.

    `fill` says what becomes of an incomplete last round that is not dropped: "batches" completes it to full batches,
    "round" only until all shards hold equally many, "nothing" leaves shards with a smaller batch, or none.
    """
    rounds, rest = divmod(samples, size * shards)
    if drop_last or not rest:
        return [(rounds * size, 0, rounds)] * shards
    width = -(-rest // shards) if fill == "round" else size
    result = []
    for real in Rounds(width, shards).real(rest):
        filled = width if fill != "nothing" else real
        result.append((rounds * size + real, filled - real, rounds + (filled > 0)))
    return result
