"""One epoch of a prepared loader, read from the wrapped torch loader: from a position on, and so that a run can go on from each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

import torch

from accelerate.data import adapter, resume, workers
from accelerate.data.adapter import is_stream, skipping, variant
from accelerate.data.iterable import CountingCollate, restores, uncounted
from accelerate.data.resume import Noted, Pending, generators_kept, is_stateful
from accelerate.data.samplers import EndAhead
from accelerate.process import PartialState

if TYPE_CHECKING:
    from accelerate.data.loader import PreparedLoader

# A loader and the vote of the ranks may each be one step ahead, and the step after those is being read.
_AHEAD = 4
_NOTHING = object()


class EpochIterator:
    """The batches of one epoch. It opens the wrapped loader when it is built, and reads when it is iterated over.

    A run that goes on draws again what the interrupted one has drawn, and leaves the generators as they are: the order of
    the epoch, from their states at its start, then what was read ahead of the last step, from the states before each read.

    Attributes:
        base: the torch loader that is read, without the batches behind if they can be left out by their indices.
        reads: batches of it that make a step.
        start: steps of the epoch before the first that is read.
        to_drop: batches of a stream that are read and dropped first.
        reread: states of the generators before each step that the interrupted run had read ahead.
        order: the sampler that knows the last batch, if the indices tell.
        drawn: states of the generators after the order was drawn again; None where nothing is repeated.
        noted: what a run that goes on after a step needs, by the step; of this loop, as a loader may be in several at once.
        batches: the iterator of torch.
    """

    def __init__(self, loader: PreparedLoader, pending: Pending | None) -> None:
        self.loader, self.progress, self.reads = loader, loader._progress, loader._reads_per_step()
        self.base, self.start = loader.base_dataloader, loader._left_out()
        self.to_drop = loader.skip_batches * self.reads
        self.reread: list[dict[str, Any]] = []
        self.order: EndAhead | None = None
        self.drawn: dict[str, Any] | None = None
        self.noted: dict[int, Noted] = {}
        if pending is not None:
            self._begin_at(pending)
        if adapter.knows_end(self.base):
            self.order = EndAhead(adapter.batching_sampler(self.base))
            name = "sampler" if self.base.batch_sampler is None else "batch_sampler"
            self.base = variant(self.base, **{name: self.order})
        watch = loader.gradient_state._step_watch
        with nullcontext() if watch is None else workers.masked_start(self.base, watch.numbers):
            self.batches = self._opened() if pending is None else self._opened_again()
        if self.base.num_workers and self.base.persistent_workers:
            self.progress.workers_kept = True

    def _begin_at(self, pending: Pending) -> None:
        behind, self.start = (pending.batches - self.start) * self.reads, pending.batches
        self.reread = pending.position.get("before_read") or []
        if pending.position and self.loader._goes_on_by_itself():
            self.to_drop = 0
        elif is_stream(self.base):
            self.to_drop += behind
            state = pending.position.get("dataset_state")
            if state is not None and restores(self.base):
                self.base.dataset.load_state_dict(state)
                self.to_drop = 0
        elif behind or pending.extra_samples:
            self.base = skipping(self.base, behind, pending.extra_samples)

    def _opened(self) -> Iterator[Any]:
        base = self.base
        if base.num_workers and base.persistent_workers and base._iterator is None and self.progress.workers_kept:
            # Starting workers draws a seed. The run that goes on here had started them before, once for all epochs.
            starting = variant(base, generator=torch.Generator())
            batches = iter(starting)
            vars(base)["_iterator"] = starting._iterator
            return batches
        if getattr(base, "next_iter_state", None) is not None and is_stream(base):
            # torchdata opens the stream twice, first to find that the saved epoch is over; each time draws a seed.
            with generators_kept():
                batches = iter(base)
            torch.empty((), dtype=torch.int64).random_(generator=base.generator)
            return batches
        return iter(base)

    def _opened_again(self) -> Iterator[Any]:
        with generators_kept(self.progress.at_start):
            batches = iter(self.base)
            if self.order is not None:
                self.order.draw()
            self.drawn = resume.states()
        return batches

    def __iter__(self) -> Iterator[Any]:
        loader, batches = self.loader, self.batches
        if self.to_drop or self.reread:
            batches = chain(self._caught_up(), batches)
        # A run that goes on may read a batch again, unless the indices tell the end and nobody reads ahead.
        ahead = self.order is None or loader._reads_ahead or loader._ends_unevenly() or self.progress.parts > 1
        if not loader._notes_nothing and (is_stateful(self.base) or (ahead and not self.base.num_workers)):
            batches = self._noted(batches)
        if isinstance(self.base.collate_fn, CountingCollate):
            batches = uncounted(batches, self.start, self.base.dataset.round_log)
        return batches

    def _caught_up(self) -> Iterator[Any]:
        """Leave out the beginning of the epoch, and read again what the interrupted run had read ahead."""
        first: list[Any] = []
        with nullcontext() if self.drawn is None else generators_kept(self.drawn):
            self._drop()
            for states in self.reread:
                resume.set_states(states)
                first += islice(self.batches, self.reads)
        yield from first

    def _drop(self) -> None:
        from accelerate.utils.tqdm import tqdm

        hidden, number = not PartialState().is_local_main_process, self.to_drop
        # Shown when it takes long: a stream that cannot be restored has to be read again from its beginning.
        bar = tqdm(range(number), desc="reading up to where the run stood", unit=" batches", delay=2.0, disable=hidden)
        for done in bar:
            if next(self.batches, _NOTHING) is _NOTHING:
                if number - done < self.reads:
                    return  # the last step of the epoch had fewer
                raise ValueError(
                    f"{number} batches were to be left out, but the data ended after {done} of them. Skip fewer batches, or read "
                    "the data that the checkpoint was saved with."
                )

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Note, before the reads of each step, the states of the generators, of the stream and of a stateful loader.

        The step yielded last is one or two behind the step read last. A checkpoint belongs to the former, so it needs what
        the reads that went ahead have used up.
        """
        self.progress.noted = self.noted
        for step in count(self.start + 1):
            self._note(step)
            taken = 0
            for batch in islice(batches, self.reads):
                taken += 1
                yield batch
            if taken < self.reads:
                self._note(step + (taken > 0))  # a stateful loader knows now that it is at its end
                return

    def _note(self, step: int) -> None:
        base, noted, random, ahead = self.base, self.noted, None, step - self.start - 1
        if not base.num_workers:
            random = self.reread[ahead] if ahead < len(self.reread) else resume.states()
        dataset = base.dataset.state_dict() if restores(base) else None
        noted[step] = Noted(random, dataset, base.state_dict() if is_stateful(base) else None)
        noted.pop(step - _AHEAD, None)
