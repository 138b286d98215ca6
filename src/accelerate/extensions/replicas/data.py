"""Which batch of an epoch each replica group reads: the groups that take part in a step share its next batches.

The batches of an epoch have a fixed order. A step of `count` groups uses the next `count` of them for each micro-batch: the group with
rank `rank` reads every `count`-th one. Only a committed step advances the position, so each batch is used exactly once.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from accelerate.data import adapter
from accelerate.data.adapter import is_stateful, is_stream
from accelerate.data.loader import DataLoaderShard, SkipDataLoader
from accelerate.data.reading import Reading
from accelerate.data.samplers import layers

# The first batches of an epoch, by which groups compare their orders.
_COMPARED = 100


@dataclass
class Position:
    """How far the replica groups are together: the epoch, and its batches that committed steps have used."""

    epoch: int = 0
    batches: int = 0

    def plain(self) -> dict[str, int]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Share:
    """The batches of one group in the rest of an epoch, as long as the same groups take part.

    Attributes:
        first: Batches of the epoch that are used already.
        rank: The rank of the group among those that take part.
        count: How many groups take part.
        length: Batches of the epoch.
    """

    first: int
    rank: int
    count: int
    length: int

    @property
    def rounds(self) -> int:
        """How many micro-batches each group has; in the last one, some groups may repeat a batch."""
        return -(-(self.length - self.first) // self.count)

    def weight(self, round_number: int) -> float:
        """Return the factor of a micro-batch in the mean over the groups: 0 for a repeated batch, above 1 next to repeated ones."""
        left = min(self.count, self.length - self.first - round_number * self.count)
        return self.count / left if self.rank < left else 0.0

    def used_after(self, rounds: int) -> int:
        """Return how many batches of the epoch are used once all groups have had so many micro-batches."""
        return min(self.length, self.first + rounds * self.count)


class ShareSampler:
    """The batches of a sampler that belong to a share; others are not loaded."""

    def __init__(self, batches: Any, share: Share) -> None:
        self.batches, self.share = batches, share

    def __getattr__(self, name: str) -> Any:
        # batch_size, drop_last, set_epoch and the like are those of the sampler inside.
        if name in ("batches", "share") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return self.share.rounds

    def __iter__(self) -> Iterator[Any]:
        share, batch, yielded = self.share, None, 0
        for number, batch in enumerate(self.batches):
            if number >= share.first and (number - share.first) % share.count == share.rank:
                yielded += 1
                yield batch
        if yielded < share.rounds:
            yield batch  # this group has none left, and takes the step with weight 0


def check_loader(loader: Any) -> None:
    """Refuse a loader whose batches cannot be shared between replica groups."""
    if not isinstance(loader, DataLoaderShard) or isinstance(loader, SkipDataLoader):
        raise ValueError(
            f"replica_batches() got loader={type(loader).__name__}. Pass a loader that `accelerator.prepare` returned, with "
            "dispatch_batches=False."
        )
    if is_stream(loader.base_dataloader) or is_stateful(loader.base_dataloader):
        raise ValueError(
            "replica_batches() got a loader of an iterable dataset, or one with use_stateful_dataloader=True, which cannot be read by "
            "position. Use a map-style dataset and a plain loader."
        )
    if loader._reading.ends_by_vote or loader._origin is not None:
        raise ValueError(
            "replica_batches() got a loader with even_batches=False, or one of skip_first_batches. Prepare it with even_batches=True; "
            "the position in the epoch is known without skip_first_batches."
        )


def _sampler(loader: Any) -> Any:
    return adapter.batching_sampler(loader.base_dataloader)


def set_order(loader: Any, epoch: int, seed: int) -> None:
    """Fix the order of the samples of an epoch, which is then the same in every group and after a restart."""
    progress = loader._progress
    progress.pending, progress.finished = (
        None,
        0,
    )  # a position that `load_state` has restored for an epoch of one group
    for part in layers(_sampler(loader)):
        if "generator" in vars(part):
            part.generator = part.generator or torch.Generator()  # without one it draws from that of the process
            part.generator.manual_seed(seed + epoch)
    loader.set_epoch(epoch)


def order_of(loader: Any, epoch: int, seed: int) -> str:
    """Return a digest of the first batches of an epoch on this rank."""
    set_order(loader, epoch, seed)
    batches = islice(_sampler(loader), _COMPARED)
    return hashlib.sha256(
        repr([list(batch) if not isinstance(batch, int) else batch for batch in batches]).encode()
    ).hexdigest()


def open_share(loader: Any, share: Share, epoch: int, seed: int) -> Iterator[Any]:
    """Return the batches of a share, from a view of the loader that knows its last one."""
    set_order(loader, epoch, seed)
    view = loader._skipping(0)
    sampler = ShareSampler(_sampler(loader), share)
    # Its rounds are not those of the loader, so that no batch counts as incomplete.
    base = adapter.iterating(loader.base_dataloader, sampler)
    vars(view).update(base_dataloader=base, _reading=Reading, _drop_last=True)
    return iter(view)
