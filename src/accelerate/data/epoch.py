"""One epoch of a torch loader, read from its start or from a position within it.

A run that continues at a position draws the order of the epoch again, from the states of the generators at the epoch's start. Then it
skips the batches behind the position. Last, it repeats the reads that the interrupted run had made ahead of the loop, each from
the states before it. The generators of the program have afterwards the states that they had before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, count, islice
from typing import Any

import torch

from accelerate.data import adapter, resume
from accelerate.data.adapter import DataLoaderAdapter, is_stateful, is_stream, skipping, variant
from accelerate.data.iterable import CountingCollate, restores, uncounted
from accelerate.data.progress import BeforeRead, Position
from accelerate.data.samplers import EndAhead
from accelerate.process import PartialState
from accelerate.runtime import generators

# A loader and the vote of the ranks may each be one step ahead, and the step after those is being read.
_AHEAD = 4
_NOTHING = object()


class FromStart:
    """The batches of an epoch from its start, without those that the loader skips. `iter` opens the torch loader.

    Attributes:
        base: the torch loader that is read.
        reads: batches of it that make a step.
        first_step: number of the first step that is read, from 0; so many steps are skipped.
        to_drop: batches of a stream that are read and dropped first.
        order: the sampler that knows the last batch, if the indices tell; once the loader is open.
        states_ahead: states of the generators before each step that an interrupted run had read ahead.
        loaded: the state from which torchdata's loader continues, until each of its workers has read a batch.
    """

    def __init__(self, loader: DataLoaderAdapter) -> None:
        self.loader, self.progress, self.reads = loader, loader._progress, loader._reads_per_step()
        self.base, self.first_step = loader.base_dataloader, loader._left_out()
        self.to_drop = loader.skip_batches * self.reads
        self.order: EndAhead | None = None
        self.states_ahead: list[dict[str, Any]] = []
        self.loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if adapter.knows_end(self.base):
            self.order = EndAhead(adapter.batching_sampler(self.base))
            self.base = adapter.iterating(self.base, self.order)
        base, loader = self.base, self.loader
        with ExitStack() as contexts:
            for hook in loader._extensions.starting_workers if base.num_workers else ():
                contexts.enter_context(hook(base))
            batches = self._open()
        if base.num_workers and base.persistent_workers:
            self.progress.workers_kept = True
        if self._repeats_reads():
            batches = self._noted(batches)
        if isinstance(base.collate_fn, CountingCollate):
            batches = uncounted(batches, self.first_step, base.dataset.round_log)
        return batches

    def _repeats_reads(self) -> bool:
        """Whether a run that continues in this epoch needs the states from before the reads of a step."""
        loader = self.loader
        if loader._notes_nothing:  # a thread reads too far ahead
            return False
        if is_stateful(self.base):  # its own state is of the batch read last, not of the one yielded last
            return True
        if self.base.num_workers:  # they draw from seeded generators
            return False
        # Without an order that tells the end, the loop reads a batch ahead, as these loaders do always.
        return self.order is None or loader._reads_ahead or loader._ends_unevenly() or self.progress.micro_batches > 1

    def _open(self) -> Iterator[Any]:
        base = self.base
        if base.num_workers and base.persistent_workers and base._iterator is None and self.progress.workers_kept:
            # Starting workers draws a seed. The interrupted run had started them before, once for all epochs.
            starting = variant(base, generator=torch.Generator())
            batches: Iterator[Any] = iter(starting)
            vars(base)["_iterator"] = starting._iterator
        elif getattr(base, "next_iter_state", None) is not None and is_stream(base):
            # torchdata opens the stream twice, first to find that the saved epoch is over; each time draws a seed.
            with generators.kept():
                batches = iter(base)
            torch.empty((), dtype=torch.int64).random_(generator=base.generator)
        else:
            batches = iter(base)
        return chain(self._drop(batches), batches) if self.to_drop else batches

    def _drop(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield nothing, after reading the batches to drop."""
        from tqdm.auto import tqdm

        hidden, number = not PartialState().is_local_main_process, self.to_drop
        # Shown when it takes long: a stream that cannot be restored has to be read again from its beginning.
        bar = tqdm(
            range(number), desc="reading up to the position of the run", unit=" batches", delay=2.0, disable=hidden
        )
        for done in bar:
            if next(batches, _NOTHING) is _NOTHING:
                if number - done < self.reads:
                    return  # the last step of the epoch had fewer
                raise ValueError(
                    f"{number} batches were to be omitted, but the data ended after {done} of them. Skip fewer batches, or read "
                    "the data that the checkpoint was saved with."
                )
        yield from ()

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Note, before the reads of each step, what a run has to repeat that continues after an earlier step."""
        # Of this iteration, as a loader may be in several at once.
        self.progress.before_read = before_read = {}
        for step in count(self.first_step + 1):
            before_read[step] = self._states(step)
            before_read.pop(step - _AHEAD, None)
            taken = 0
            for batch in islice(batches, self.reads):
                taken += 1
                yield batch
            if taken < self.reads:
                # A stateful loader knows now that it is at its end.
                before_read[step + (taken > 0)] = self._states(step + (taken > 0))
                return

    def _states(self, step: int) -> BeforeRead:
        base, random, ahead = self.base, None, step - self.first_step - 1
        if not base.num_workers:
            random = self.states_ahead[ahead] if ahead < len(self.states_ahead) else generators.states()
        dataset = base.dataset.state_dict() if restores(base) else None
        state = base.state_dict() if is_stateful(base) else None
        if self.loaded is not None:
            complete = resume.with_unread_workers(state, self.loaded)
            state, self.loaded = (state, None) if complete is None else (complete, self.loaded)
        return BeforeRead(random, dataset, state)


class FromPosition(FromStart):
    """The batches of an epoch from a position on: by a state if the loader or its stream restores one, else by skipping."""

    def __init__(self, loader: DataLoaderAdapter, position: Position) -> None:
        super().__init__(loader)
        behind, self.first_step = (position.batches - self.first_step) * self.reads, position.batches
        self.states_ahead = position.record.get("before_read") or []
        state = position.record.get("dataset_state")
        if position.loader_continues:
            self.to_drop, self.loaded = 0, position.loader_state
        elif adapter.skips_by_index(self.base):
            if behind or position.extra_samples:
                self.base = skipping(self.base, behind, position.extra_samples)
        elif state is not None and restores(self.base):
            self.base.dataset.load_state_dict(state)
            self.to_drop = 0
        else:
            self.to_drop += behind

    def _open(self) -> Iterator[Any]:
        with generators.kept(self.progress.start.generators):
            batches = iter(self.base)
            if self.order is not None:
                self.order.draw()  # here, because its sampler must draw from the generators of the epoch's start
            drawn = generators.states()
        return chain(self._caught_up(batches, drawn), batches)

    def _caught_up(self, batches: Iterator[Any], drawn: dict[str, Any]) -> Iterator[Any]:
        """Drop the batches behind the position, then repeat the reads that went ahead."""
        if self.to_drop:
            with generators.kept(drawn):
                yield from self._drop(batches)
        for states in self.states_ahead:
            with generators.kept(states):
                step = list(islice(batches, self.reads))
            yield from step
