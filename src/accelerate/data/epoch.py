"""One epoch of a torch loader, read from its start or from a position within it.

A run that continues at a position draws the order of the epoch again, from the states of the generators at the epoch's start. Then it
skips the batches behind the position. Last, it repeats the reads that the interrupted run had made ahead of the loop, each from
the states before it. Afterwards the generators of the program have the states that they had before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

import torch

from accelerate.data import adapter, resume
from accelerate.data.adapter import DataLoaderAdapter, is_stateful, is_stream, shuffling_generator, skipping, variant
from accelerate.data.iterable import CountingCollate, restores, uncounted
from accelerate.data.progress import BeforeRead, EpochStart, Position
from accelerate.data.samplers import EndAhead, ReplayableRandomSampler
from accelerate.process import PartialState
from accelerate.runtime import generators

# A loader and the vote of the ranks may each be one step ahead, and the step after those is being read.
_AHEAD = 4
_NOTHING = object()


# How an iteration begins -----------------------------------------------------------------------------------------------


def replacement_iterator(loader: DataLoaderAdapter, finished: int) -> Iterable[Any] | None:
    """Return what a loader yields after a load in place of its batches; None for its batches, as always without `skip_first_batches`.

    A view that skips all batches of an epoch that is over, which had `finished` batches, yields nothing: the loader is in the next epoch
    already. A stateful loader continues at the position without the view.
    """
    view, progress = loader, loader._progress
    if view._origin is None:
        return None
    skipped, pending = view._steps_skipped(), progress.pending
    if finished and pending is None and skipped == finished:
        return ()
    if progress.pending_in_epoch and pending.batches == skipped and is_stateful(view.base_dataloader):
        progress.pending = replace(pending, resume_without_skip=True)
        return view._origin
    return None


def take_pending_position(loader: DataLoaderAdapter) -> Position | None:
    """Return the loaded position that an iteration continues at, or None for an epoch that begins again.

    Not a collective.
    """
    progress = loader._progress
    pending = progress.pending
    if pending is None:
        return None
    in_its_epoch, progress.pending = progress.pending_in_epoch, None
    skipped = loader._steps_skipped()
    skips_as_many = skipped > 0 and skipped == pending.batches
    continues_without_skip = pending.resume_without_skip and loader._origin is None
    if in_its_epoch and (skips_as_many or continues_without_skip):
        if loader._origin is None:
            resume.report(
                f"The loader continues in epoch {progress.epoch} after {pending.batches} of its batches, where the checkpoint was "
                "saved. DataLoaderConfiguration(continue_after_load=False) begins epochs again."
            )
        # Another loader that shares the generator has set it meanwhile.
        resume.restore_order(loader, pending.record["order"], in_epoch=False)
        return pending
    resume.drop_loaded_state(loader)
    if skipped and in_its_epoch:
        return Position({"at_start": pending.record.get("at_start")}, skipped)
    sampler = loader.get_sampler()
    generator = shuffling_generator(loader, sampler)
    state_when_saved = pending.record.get("anew")
    if generator is not None and state_when_saved is not None:
        generator.set_state(generators.generator_state(state_when_saved))
    if isinstance(sampler, ReplayableRandomSampler):
        sampler.replay = None
    return None


def epoch_start(loader: DataLoaderAdapter, position: Position | None) -> EpochStart:
    """Return the states at the start of an epoch, before its order is drawn: those of the run that began it."""
    generator = shuffling_generator(loader, loader.get_sampler())
    order = None if generator is None else generator.get_state()
    if position is None:
        return EpochStart(generators.states(), order, 0)
    return EpochStart(position.record.get("at_start"), order, position.extra_samples)


# Its batches -------------------------------------------------------------------------------------------------------------


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
        self.base, self.first_step = loader.base_dataloader, loader._steps_skipped()
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
        notes_states = self._repeats_reads()
        if notes_states or self.to_drop or self.states_ahead:
            batches = self._step_by_step(batches, notes_states)
        if isinstance(base.collate_fn, CountingCollate):
            batches = uncounted(batches, self.first_step, base.dataset.round_log)
        return batches

    def _repeats_reads(self) -> bool:
        """Whether a run that continues in this epoch needs the states from before the reads of a step."""
        loader = self.loader
        if loader._notes_nothing:  # a thread reads too far ahead
            return False
        if is_stateful(self.base):  # its state is that of the batch read last, not of the one yielded last
            return True
        if self.base.num_workers:  # they draw from seeded generators
            return False
        # Without an order that tells the end, the loop reads a batch ahead, as these loaders do always.
        reads_ahead = loader._reads_ahead or loader._reading.ends_by_vote
        return self.order is None or reads_ahead or self.progress.micro_batches > 1

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
        return batches

    def _step_by_step(self, batches: Iterator[Any], notes_states: bool) -> Iterator[Any]:
        """Drop batches, repeat the reads that went ahead, and note what a run that continues after a step has to repeat."""
        if self.to_drop:
            self._drop(batches)
        # Of this iteration, as a loader may be in several at once.
        before_read: dict[int, BeforeRead] = {}
        if notes_states:
            self.progress.before_read = before_read
        for step, states in enumerate(chain(self.states_ahead, repeat(None)), self.first_step + 1):
            with nullcontext() if states is None else generators.kept(states):
                if notes_states:
                    before_read[step] = self._states()
                    before_read.pop(step - _AHEAD, None)
                reads = list(islice(batches, self.reads))
            yield from reads
            if len(reads) < self.reads:
                if notes_states:  # a stateful loader knows now that it is at its end
                    before_read[step + bool(reads)] = self._states()
                return

    def _drop(self, batches: Iterator[Any]) -> None:
        from tqdm.auto import tqdm

        label, hidden = "reading up to the position of the run", not PartialState().is_local_main_process
        # Shown when it takes long: a stream that cannot be restored has to be read again from its beginning.
        bar = tqdm(range(self.to_drop), label, unit=" batches", delay=2.0, disable=hidden)
        for dropped in bar:
            if next(batches, _NOTHING) is _NOTHING:
                if self.to_drop - dropped < self.reads:
                    return  # the last step of the epoch had fewer
                raise ValueError(
                    f"{self.to_drop} batches were to be omitted, but the data ended after {dropped} of them. Skip fewer batches, "
                    "or read the data that the checkpoint was saved with."
                )

    def _states(self) -> BeforeRead:
        base = self.base
        random = None if base.num_workers else generators.states()
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
        self.states_after_opening: dict[str, Any] | None = None
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
            self.states_after_opening = generators.states()
        return batches

    def _drop(self, batches: Iterator[Any]) -> None:
        with generators.kept(self.states_after_opening):
            super()._drop(batches)
