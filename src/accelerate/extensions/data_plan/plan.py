"""The data plan: who gets which part of the data, and how many samples and steps that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.base.table import table


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
        reading: how it is read, the name of a class of `data.reading`.
        process_index: the process that the plan was made in; `shard_index` is its shard.
        parts: number of parts that the data came in; 1 where preparing has divided it.
        samples: samples that an epoch uses, over all shards, each counted once; `duplicates` come on top.
        dropped: samples that the sampler draws in an epoch but no process receives, because of `drop_last`.
        total_batch_size: samples that all processes together receive in a step.
        sampler: kind of the sampler that decides the order, or of the batch sampler if it has none; None for a stream.
        walked: each process goes through the batches of all to find its own, because the sampler is not one of torch's.
        ends_by_vote: shards may end at different steps, so the processes vote in every step on whether all have a batch.
    """

    kind: str
    reading: str
    process_index: int
    shard_index: int
    shards: tuple[ShardPlan, ...]
    parts: int = 1
    dataset_length: int | None = None
    samples: int | None = None
    duplicates: int | None = None
    dropped: int | None = None
    batch_size: int | None = None
    total_batch_size: int | None = None
    workers: int = 0
    sampler: str | None = None
    drop_last: bool = False
    ends_by_vote: bool = False
    walked: bool = False

    @property
    def own(self) -> ShardPlan:
        """The shard of the process that the plan was made in."""
        return self.shards[self.shard_index]

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
        if self.ends_by_vote:
            facts.append(("end", "all processes stop when the first shard ends"))
        return facts


def _known(value: Any | None) -> str:
    return "unknown" if value is None else str(value)
