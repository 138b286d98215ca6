"""What every prepared loader knows about itself while it is iterated: the epoch, the position, the end."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate.data import lengths
from accelerate.data.plan import RoundLog


@dataclass(frozen=True)
class Pending:
    """A position of the running epoch that was loaded and waits for the next iteration.

    Args:
        batches: steps behind it.
        extra_samples: samples of all processes behind it beyond those steps.
        alone: continue there without being asked; otherwise only a loader that leaves out as many batches continues.
        before_read: states of the random generators for the reads of the first steps.
        dataset_state: what the stream's own `load_state_dict` takes.
        anew: state of the shuffling generator for an iteration that begins anew.
        position: what was loaded, for a checkpoint that is saved before the next iteration.
    """

    batches: int
    extra_samples: int = 0
    alone: bool = True
    before_read: list[dict[str, Any]] | None = None
    dataset_state: Any = None
    anew: torch.Tensor | None = None
    position: dict[str, Any] | None = None


@dataclass
class Progress:
    """Where a loader stands. The views that `skip_first_batches` makes share it with their origin.

    Args:
        epoch: the epoch that is running, or comes next.
        batches: batches of the running epoch yielded so far, skipped ones included; 0 between epochs.
        extra_samples: samples of the running epoch consumed beyond those batches, by a run of another size.
        running: the loader is being iterated.
        pending: a position that was loaded, for the next iteration to settle.
        replaying: the next iteration continues an interrupted epoch, whose random numbers are drawn already.
        finished: batches of the epoch that was just over in the position that was loaded, until the next iteration.
        at_end: the batch yielded last is the last one of the epoch.
        generator_state: state of the shuffling generator when the running epoch began, if there is such a generator.
        at_start: states of the random generators when the running epoch began.
        before_read: by step, counted from 1, states of the random generators before the reads of the last few steps.
        dataset_state: state of a stream's own `state_dict`, as of the batch yielded last.
        workers_kept: persistent workers have been started, which no later epoch does again.
        handed_out: epoch, batches and end of what the training has received, where a thread reads several batches ahead.
        worker_seed: seed of the run that worker processes derive theirs from.
    """

    epoch: int = 0
    batches: int = 0
    extra_samples: int = 0
    running: bool = False
    pending: Pending | None = None
    replaying: bool = False
    finished: int = 0
    at_end: bool = False
    generator_state: torch.Tensor | None = None
    at_start: dict[str, Any] | None = None
    before_read: dict[int, dict[str, Any]] | None = None
    dataset_state: Any = None
    workers_kept: bool = False
    handed_out: tuple[int, int, bool] | None = None
    worker_seed: int | None = None


@dataclass
class Reading:
    """One iteration of a wrapped loader.

    Args:
        batches: iterator over the batches.
        start: number of steps left out before the first.
        ahead: knows the last batch when it is given; None if that has to be found out by reading on.
        dropped: batches that are read and dropped before the first.
        head: the batches of the epoch's first step, when an interrupted epoch goes on and they were read again.
    """

    batches: Iterator[Any]
    start: int = 0
    ahead: Any = None
    dropped: int = 0
    head: list[Any] = field(default_factory=list)


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
    _drop_last: bool = False
    # On XLA devices a thread reads ahead; the wrapper around this loader is the active one then.
    read_in_background: bool = False

    def reset(self) -> None:
        """Forget the end and the remainder of the last iteration."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start an iteration: reset, work out the remainder, become the active loader."""
        self.reset()
        self.remainder = self._remainder_ahead()
        self._progress.running = True
        if not self.read_in_background:
            self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Finish an iteration: the loader that was active before becomes active again."""
        self._progress.running = False
        if not self.read_in_background:
            self.gradient_state._remove_dataloader(self)

    @functools.cached_property
    def _progress(self) -> Progress:
        # Loaders of this package set it when they are built; a class of a library that mixes this in need not know of it.
        return Progress()

    def _remainder_ahead(self) -> int:
        """The remainder as far as it can be told before the first batch; -1 if it cannot."""
        if self._drop_last:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except (AttributeError, TypeError):
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

    def _run(self, reading: Reading, place: Any) -> Iterator[Any]:
        """Yield the batches of one epoch, placed, and know the last one as such when it is yielded.

        Args:
            reading: the wrapped loader's remaining batches, and how their end is known.
            place: function that brings a batch to the device, or None.
        """
        progress = self._progress
        progress.batches, progress.at_end = reading.start, False
        if reading.ahead is None:
            for batch in self._one_ahead(reading):
                yield batch if place is None else place(batch)
        else:
            # The indices tell the end, so no batch is read before its turn: what the dataset draws at random comes in the
            # order of a plain loop. Written out in one loop, because it runs for every batch of most programs.
            ahead, number, hand_out = reading.ahead, reading.start, self._hand_out
            active = self.gradient_state._active
            own = active[-1] if active else None
            for batch in reading.batches:
                number += 1
                progress.batches = number
                if ahead.ended or self.end_of_dataloader or not active or active[-1] is not own:
                    hand_out(ahead.ended)
                yield batch if place is None else place(batch)
        progress.batches = progress.extra_samples = 0
        progress.before_read = None
        progress.epoch += 1

    def _one_ahead(self, reading: Reading) -> Iterator[Any]:
        progress, number = self._progress, reading.start
        batch = next(reading.batches, _NOTHING)
        if batch is _NOTHING:
            return
        for number, ahead in enumerate(reading.batches, reading.start + 1):
            progress.batches = number
            self._hand_out(False)
            yield batch
            batch = ahead
        progress.batches = number + 1
        self._hand_out(True)
        yield batch

    def _hand_out(self, is_last: bool) -> None:
        """Note, before a batch is yielded, whether it is the last one, and that it is this loader's turn.

        Loops may take turns, and one loader may be iterated by two of them.
        """
        self.gradient_state._activate(self)
        self.end_of_dataloader = is_last
        if is_last:
            self._progress.at_end = True
            counts = self.batch_counts
            if counts is not None:
                self.remainder = sum(counts)


_NOTHING = object()
