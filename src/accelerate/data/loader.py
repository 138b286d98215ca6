"""Prepared loaders: one iteration of them, one epoch of the torch loader inside, and loaders that read their own shard."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler

from accelerate.comm.in_step import in_step
from accelerate.data import adapter, resume, samplers
from accelerate.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, is_stateful, is_stream, placer, skipping
from accelerate.data.epoch import FromPosition, FromStart, epoch_start, replacement_iterator, take_pending_position
from accelerate.data.iterable import has_buffer
from accelerate.data.progress import Position, Progress
from accelerate.data.reading import Reading
from accelerate.data.samplers import BatchSamplerShard, EndAhead, ReplayableRandomSampler, layers
from accelerate.data.workers import SeededDataset, WorkerDataset
from accelerate.extension import NO_EXTENSIONS
from accelerate.runtime import generators
from accelerate.runtime.random import synchronize_rng_states
from accelerate.state import GradientState

# What all prepared loaders share ---------------------------------------------------------------------------------------


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Everything that the loaders of this package share, except how they get their batches."""

    # How the processes read the data, decided when the loader was prepared; else the class, whose defaults say one part.
    _reading: Reading | type[Reading] = Reading
    # Whether an epoch that was running when a checkpoint was saved continues automatically after a load.
    continue_after_load = True
    # Whether this kind of loader reads a batch before the loop asks for it.
    _reads_ahead = False
    # Whether a thread reads so many steps ahead that a continued run does not repeat them.
    _notes_nothing = False
    # Those of the Accelerator that prepared it.
    _extensions = NO_EXTENSIONS

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self._progress = Progress(epoch=iteration)
        self._origin: PreparedLoader | None = None  # of a view that `skip_first_batches` made
        ReplayableRandomSampler.adopt(self.get_sampler())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, gradient_state=GradientState())

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        finished, self._progress.finished = self._progress.finished, 0
        replacement = replacement_iterator(self, finished)
        if replacement is not None:
            yield from replacement
            return
        for hook in self._extensions.between_batches:
            hook(self)
        position, base, progress = take_pending_position(self), self.base_dataloader, self._progress
        self._begin_epoch(position)
        progress.start = epoch_start(self, position)
        self.begin()
        try:
            if type(base.dataset) is SeededDataset:
                progress.worker_seed = base.dataset.choose(progress.worker_seed, progress.epoch, base.generator)
            batches = self._iterate(position)
            if self._extensions.between_batches:
                batches = self._with_hooks(batches)
            for hook in self._extensions.first_batches:
                yield from hook(self, batches)
            yield from batches
        finally:
            self.end()

    def _with_hooks(self, batches: Generator[Any, None, None]) -> Iterator[Any]:
        """Yield batches, and call the extensions before each but the first."""
        with closing(batches):
            for batch in batches:
                yield batch
                for hook in () if self._progress.at_end else self._extensions.between_batches:
                    hook(self)

    def _begin_epoch(self, position: Position | None) -> None:
        """Do what comes before the order of the epoch is drawn."""

    def _iterate(self, position: Position | None) -> Iterator[Any]:
        """Yield the batches of an epoch, from the position to continue at if there is one."""
        return self._run(position, None)

    # Its epoch and its steps ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws, for all samplers and streams that know it."""
        self._progress.epoch = epoch
        for part in layers(adapter.batching_sampler(self.base_dataloader)):
            # Looked up in the class: wrappers pass on the attributes of the wrapped sampler, and the epoch is for its owner only.
            if hasattr(type(part), "set_epoch"):
                part.set_epoch(epoch)
        dataset = self.base_dataloader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
            if issubclass(type(dataset), WorkerDataset):
                dataset.announce(epoch)

    @property
    def batches_yielded(self) -> int:
        """Batches of the running epoch that this process has yielded, skipped ones included; 0 between epochs."""
        return self._progress.batches

    @property
    def batch_counts(self) -> tuple[int, ...] | None:
        """Real samples in each shard's batch of the round yielded last; None if all are real."""
        part = adapter.part_of(self.base_dataloader)
        if part is not None:
            return part.round_log.get(self._progress.batches - 1)
        return self._reading.filled_ends if self._progress.at_end else None

    def _parts(self) -> int:
        """Return in how many parts the ranks read, where the wrapped loader knows only its part; 1 where its shard knows all."""
        parts = self._reading.parts
        return parts if parts == 1 or adapter.part_of(self.base_dataloader) is None else 1

    def _batches_per_step(self) -> int:
        return super()._batches_per_step() * self._parts()

    def _reads_per_step(self) -> int:
        """Batches of the wrapped loader that this process reads for one step."""
        return 1

    def _steps_skipped(self) -> int:
        """Return the steps that this loader skips at the beginning of each iteration."""
        _, skipped = samplers.unskipped(adapter.batching_sampler(self.base_dataloader))
        return self.skip_batches + skipped // self._reads_per_step()

    def _skipping(self, number: int) -> PreparedLoader:
        """Return a view that skips the first batches and shares the epoch with this loader."""
        view = object.__new__(type(self))
        vars(view).update(vars(self), _origin=self if self._origin is None else self._origin)
        if is_stream(self):
            view.skip_batches = self.skip_batches + number
        else:
            view.base_dataloader = skipping(self.base_dataloader, number * self._reads_per_step())
        return view

    # Its position -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position and order as of the batch yielded last, of this process.

        JSON can hold it, except for the states of a dataset and its sampler. A stateful loader's state is around it.
        """
        progress = self._progress
        before_read, pending = (progress.before_read or {}).get(progress.batches + 1), progress.pending
        if progress.pending_in_epoch and pending.loader_state is not None:
            state = pending.loader_state
        elif before_read is not None and before_read.loader is not None:
            state = before_read.loader
        else:
            state = super().state_dict() if is_stateful(self.base_dataloader) else {}
        record = resume.capture(self)
        # The state of a dataset is not changed.
        of_dataset = {"dataset_state": record.pop("dataset_state")} if "dataset_state" in record else {}
        return {**state, resume.KEY: generators.plain_states(record) | of_dataset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration yield the batches that were still to come in `state_dict`."""
        state = dict(state_dict)
        record = state.pop(resume.KEY, None)
        if record is None and not is_stateful(self.base_dataloader):
            raise ValueError(
                f"state_dict has no {resume.KEY!r} entry (its keys: {sorted(state)}), so it is the state of a stateful "
                "loader. Prepare this loader with use_stateful_dataloader=True to load it."
            )
        continues = self._continues_by_itself(state)
        if record is None and not continues:
            record = self._record_of(state)
        # A caller of this function wants to continue there, whether or not the loader was being iterated.
        batches = 0 if record is None else resume.restore(self, {**record, "running": True})
        # At the beginning of an epoch only a dataset that keeps state has something to restore; loading the
        # rest would make the wrapped loader run through the finished epoch's order once more.
        # Nor does the state fit that counts the batches of another number of processes, or of a loader without its first ones.
        if record is not None:
            has_place = batches > 0 or resume.holds_dataset_state(state)
            fits = resume.batches_read(state) in (None, batches * self._reads_per_step())
            continues = continues and has_place and fits
        if continues:
            super().load_state_dict(state)
        if is_stateful(self.base_dataloader) and self._progress.pending is not None:
            self._progress.pending = replace(self._progress.pending, loader_state=state, loader_continues=continues)

    def _continues_by_itself(self, state: dict[str, Any]) -> bool:
        """Whether the wrapped loader, given `state`, continues there with no sample lost."""
        base = self.base_dataloader
        if not is_stateful(base) or has_buffer(base.dataset):
            return False
        return not is_stream(base) or resume.restores_stream(state)

    def _record_of(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return the position in a stream that a state of torchdata's loader has; None at the beginning of an epoch."""
        steps = (resume.batches_read(state) or 0) // self._reads_per_step()
        return {**resume.capture(self), "batches": steps, "samples": None} if steps else None

    # Its batches -----------------------------------------------------------------------------------------------------

    def _epoch(self, position: Position | None) -> FromStart:
        return FromStart(self) if position is None else FromPosition(self, position)

    def _run(
        self, position: Position | None, place: Callable[[Any], Any] | None, through: Callable[..., Any] | None = None
    ) -> Iterator[Any]:
        """Yield the batches of an epoch, each as soon as it is known whether it is the last one."""
        reading = self._epoch(position)
        batches = iter(reading)
        order: EndAhead | None = reading.order
        if through is not None:  # which reads ahead, so that the indices are further than the batches
            batches, order = through(batches), None
        # Where the indices tell the end, no batch is read before its turn: what the dataset draws at random comes in the order
        # of a plain loop.
        if order is None:
            batches = order = EndAhead(batches)
        return self._hand_out_each(batches, order, reading.first_step, place)

    def _hand_out_each(
        self, batches: Iterable[Any], order: EndAhead, start: int, place: Callable[[Any], Any] | None
    ) -> Iterator[Any]:
        """Yield batches from step `start` on, of which `order` knows the last."""
        progress, active = self._progress, self.gradient_state._active
        progress.batches, progress.at_end = start, False
        epoch = progress.epoch
        innermost_loop = active[-1] if active else None
        try:
            for number, batch in enumerate(batches, start + 1):
                progress.batches, is_last = number, order.ended
                # Not for every batch.
                if is_last or self.end_of_dataloader or not active or active[-1] is not innermost_loop:
                    self._hand_out(is_last)
                yield batch if place is None else place(batch)
        except GeneratorExit:
            # A loop that is left at the last batch has finished the epoch, unless `set_epoch` has chosen one meanwhile.
            if progress.at_end and progress.batches and progress.epoch == epoch:
                self._finish_epoch()
            raise
        progress.at_end = True  # also where there was no batch
        self.end_of_dataloader = progress.batches > 0  # of an empty loader no batch was the last, as in upstream
        self._finish_epoch()

    def _hand_out(self, is_last: bool) -> None:
        """Note, before a batch is yielded, whether it is the last, and that it is this loader's turn."""
        self.gradient_state._activate(self)
        self.end_of_dataloader = is_last
        if is_last:
            self._progress.at_end = True
            counts = self.batch_counts
            if counts is not None:
                self.remainder = sum(counts)
            elif self.remainder > 0 and (self._shard_fills_up() or self._ends_before_others()):
                # Where it fills up, it had nothing to fill up: the length of the data or of its sampler was an estimate.
                # The incomplete round comes after the last one of a rank that ends before others.
                self.remainder = 0

    def _shard_fills_up(self) -> bool:
        part = adapter.part_of(self.base_dataloader)
        return part is not None and part.even_batches

    @property
    def _may_fill_uncounted(self) -> bool:
        """Whether the last round may have samples to drop of which `batch_counts` does not tell."""
        by_index = isinstance(adapter.part_of(self.base_dataloader), BatchSamplerShard)
        # A shard by index counts its duplicates. Its remainder, if known, is for gathered batches that a caller has padded.
        return not (self._drop_last or (by_index and self.remainder < 0))

    def _ends_before_others(self) -> bool:
        """Whether other ranks have a batch after the one that this rank has yielded last."""
        part, progress = adapter.part_of(self.base_dataloader), self._progress
        if not isinstance(part, BatchSamplerShard) or part.even_batches:
            return False
        return part.has_round_after(progress.batches, progress.start.extra_samples)

    def _finish_epoch(self) -> None:
        progress = self._progress
        if progress.before_read is not None:  # this process has read the data
            self.adjust_state_dict_for_prefetch()
        progress.before_read, progress.batches = None, 0
        progress.epoch += 1


# The loaders -----------------------------------------------------------------------------------------------------------


class DataLoaderShard(PreparedLoader):
    """A loader of this process's shard: it synchronises shuffling, places batches, and knows its last batch.

    `prepare_data_loader` builds it; the dataset or the samplers it is given are sharded already.

    Args:
        dataset: the dataset to load from.
        device: where batches are moved; None leaves them where they are.
        rng_types: random generators that all processes take over from the main process when an epoch starts, as in
            `accelerate.utils.synchronize_rng_states`.
        synchronized_generator: the generator meant by the entry "generator" of `rng_types`.
        skip_batches: number of batches of a stream to read and drop at the beginning of each iteration.
        use_stateful_dataloader: wrap torchdata's `StatefulDataLoader`.
        _drop_last: an incomplete last round is dropped, so there is no remainder.
        _non_blocking: let copies from pinned memory overlap with computation.
        torch_device_mesh: the device mesh of the run, kept for reference.
        iteration: the epoch that the first iteration is.
        **kwargs: arguments of the wrapped loader.

    Example:
        >>> loader = DataLoaderShard(range(6), device="cpu", batch_size=4)
        >>> [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        [([0, 1, 2, 3], False), ([4, 5], True)]
    """

    __module__ = "accelerate.data_loader"

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any | None = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches, use_stateful_dataloader, iteration, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.torch_device_mesh = torch_device_mesh

    def _begin_epoch(self, position: Position | None) -> None:
        if self.rng_types and position is None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.set_epoch(self.iteration)

    def _iterate(self, position: Position | None) -> Iterator[Any]:
        place = placer(self.device, self._non_blocking)
        return self._run(position, place, in_step if self._reading.ends_by_vote else None)

    def _remainder_ahead(self) -> int:
        if self._drop_last:
            return -1
        if self._parts() > 1:
            return 0  # nothing is filled up; duplicates of the user's sampler are counted in the last batch
        if is_stream(self.base_dataloader) and self.base_dataloader.num_workers > 1:
            return -1  # each worker ends with its own batch, so the total tells nothing about the last one
        size = self._samples_per_step()
        samples = adapter.samples_per_epoch(self.base_dataloader)
        if size is None or samples is None:
            return -1
        batches: Any = self.base_dataloader.batch_sampler
        while hasattr(batches, "batch_sampler"):
            batches = batches.batch_sampler
        kind = type(batches)
        as_torch = isinstance(batches, BatchSampler) and kind.__iter__ is BatchSampler.__iter__
        if not (batches is None or as_torch or kind.__module__.startswith("torchdata.")):
            return 0  # a batch sampler of the user's own may have short batches anywhere
        # A run of another size may have consumed samples beyond whole steps.
        return (samples - self._progress.start.extra_samples) % size


class SkipDataLoader(PreparedLoader):
    """A loader without its first batches, for streams: they are read and dropped.

    `prepare` shards it like the loader below it; each process omits so many of its batches.

    Args:
        dataset: the dataset to load from.
        skip_batches: number of batches to drop at the beginning of each iteration.
        use_stateful_dataloader: wrap torchdata's `StatefulDataLoader`.
        **kwargs: arguments of the wrapped loader.

    Example:
        >>> [len(batch) for batch in SkipDataLoader(range(5), skip_batches=1, batch_size=2)]
        [2, 1]
    """

    __module__ = "accelerate.data_loader"
