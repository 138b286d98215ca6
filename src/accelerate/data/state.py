"""What every prepared loader knows about itself while it is iterated: the epoch, the position, the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.data import lengths
from accelerate.data.plan import RoundLog


@dataclass
class Progress:
    """Where a loader stands. The views that `skip_first_batches` makes share it with their origin.

    Args:
        epoch: the epoch that is running, or comes next.
        batches: batches of the running epoch yielded so far, skipped ones included; 0 between epochs.
        resume_at: batches that the next iteration leaves out, once, because a state was loaded.
        replaying: the next iteration continues an interrupted epoch, whose random numbers are drawn already.
        at_end: the batch yielded last is the last one of the epoch.
        generator_state: state of the shuffling generator when the running epoch began, if there is such a generator.
    """

    epoch: int = 0
    batches: int = 0
    resume_at: int = 0
    replaying: bool = False
    at_end: bool = False
    generator_state: torch.Tensor | None = None


class DataLoaderStateMixin:
    """Loop state of a loader: it tells `GradientState` that it is being iterated, and where it stands.

    `begin` and `end` bracket an iteration. The loaders of this package call them, also when a loop is left early: when
    the running iterator is closed or dropped.

    Attributes:
        end_of_dataloader: whether the batch yielded last is the last one of the epoch.
        remainder: number of real samples, over all processes, in the last round of the epoch; -1 if not known (yet).
            0 means that the last round is a full one.
    """

    __module__ = "accelerate.data_loader"

    end_of_dataloader: bool = False
    remainder: int = -1

    def reset(self) -> None:
        """Forget the end and the remainder of the last iteration."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start an iteration: reset, work out the remainder, become the active loader."""
        self.reset()
        self.remainder = self._remainder_ahead()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Finish an iteration: the loader that was active before becomes active again."""
        self.gradient_state._remove_dataloader(self)

    def _remainder_ahead(self) -> int:
        """The remainder as far as it can be told before the first batch; -1 if it cannot."""
        return -1

    @property
    def iteration(self) -> int:
        """The epoch that is running, or comes next. A view made by `skip_first_batches` shares it with its origin."""
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.epoch = epoch

    @property
    def batches_yielded(self) -> int:
        """Batches of the running epoch that this process has yielded, skipped ones included; 0 between epochs."""
        return self._progress.batches

    @property
    def counts_known(self) -> bool:
        """Whether `batch_counts` can be relied on; not for a stream that worker processes divide among themselves."""
        return not lengths.is_sharded_in_workers(self.base_dataloader)

    @property
    def batch_counts(self) -> tuple[int, ...] | None:
        """Number of real samples in each shard's batch of the round yielded last; None if all samples are real.

        Only the round that was completed with duplicates has counts. The real samples come first in each batch.
        """
        log = self._round_log()
        return None if log is None else log.padded.get(self._progress.batches - 1)

    def _round_log(self) -> RoundLog | None:
        return lengths.round_log(self.base_dataloader)

    def _run(self, batches: Iterator[Any], start: int, place: Any) -> Iterator[Any]:
        """Yield the batches of one epoch, placed, with one read ahead so that the last one is known as such.

        Args:
            batches: iterator over the wrapped loader's remaining batches.
            start: number of batches left out before the first.
            place: function that brings a batch to the device, or None.
        """
        progress = self._progress
        progress.batches, progress.at_end = start, False
        number = start
        batch = next(batches, _NOTHING)
        if batch is not _NOTHING:
            if place is not None:
                batch = place(batch)
            for number, ahead in enumerate(batches, start + 1):
                progress.batches = number
                yield batch
                batch = ahead if place is None else place(ahead)
            progress.batches = number + 1
            self.end_of_dataloader = progress.at_end = True
            counts = self.batch_counts
            if counts is not None:
                self.remainder = sum(counts)
            yield batch
        progress.batches = 0
        progress.epoch += 1


_NOTHING = object()
