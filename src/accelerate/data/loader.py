"""Loaders that read their own shard: every process runs its own torch loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.data import agree, lengths, randomness, resume, seeding, streams
from accelerate.data.adapter import DataLoaderAdapter, as_stateful, is_stateful, variant
from accelerate.data.ahead import knows_end, with_end
from accelerate.data.iterable import CountingCollate, uncounted
from accelerate.data.placement import placer
from accelerate.data.plan import DataPlan
from accelerate.data.samplers import ReplayableRandomSampler
from accelerate.data.shards import SkipBatchSampler
from accelerate.data.state import DataLoaderStateMixin, Pending, Progress, Reading
from accelerate.state import GradientState
from accelerate.utils.random import synchronize_rng_states


def skipping(loader: DataLoader, count: int, extra: int = 0) -> DataLoader:
    """A copy of a torch loader with a map-style dataset that leaves out its first batches; they are not loaded."""
    if loader.batch_sampler is None:
        changes = {"sampler": SkipBatchSampler(loader.sampler, count, extra)}
    else:
        changes = {"batch_sampler": SkipBatchSampler(loader.batch_sampler, count, extra)}
    return as_stateful(loader, **changes) if is_stateful(loader) else variant(loader, **changes)


def _from_start(loader: DataLoader) -> DataLoader:
    """A copy of a loader that leaves nothing out and continues nothing."""
    changes = {}
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name)
        while isinstance(sampler, SkipBatchSampler):
            sampler = sampler.batch_sampler
        changes[name] = sampler
    return variant(loader, **changes, **({"next_iter_state": None} if is_stateful(loader) else {}))


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Everything that the loaders of this package share apart from how they get their batches.

    Args:
        dataset: the dataset to load from.
        skip_batches: number of batches of a stream to read and drop at the beginning of each iteration.
        use_stateful_dataloader: wrap torchdata's `StatefulDataLoader`.
        iteration: the epoch that the first iteration is.
        **kwargs: arguments of the wrapped loader.
    """

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
        self._is_view = False
        self._origin: PreparedLoader | None = None
        ReplayableRandomSampler.adopt(lengths.get_sampler(self.base_dataloader))

    def __reduce_ex__(self, protocol: int) -> Any:
        # The gradient state belongs to the process, not to the loader.
        rebuild, (cls, state) = super().__reduce_ex__(protocol)
        state.pop("gradient_state")
        return _rebuild_prepared, (rebuild, cls, state)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    @property
    def dataset(self) -> Any:
        """The dataset that the loader was given, or this process's part of a stream."""
        dataset = self.base_dataloader.dataset
        return dataset._inner if type(dataset) is seeding.SeededDataset else dataset

    @property
    def collate_fn(self) -> Any:
        """The function that makes a batch of samples, as it was given to the loader."""
        own = self.base_dataloader.collate_fn
        return own.collate_fn if isinstance(own, CountingCollate) else own

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch: shuffling samplers and streams that know `set_epoch` draw its order next.

        An iteration does this by itself, with `iteration`, which counts completed epochs.

        Args:
            epoch: the epoch that the next iteration draws.
        """
        self._progress.epoch = epoch
        lengths.tell_epoch(self.base_dataloader, epoch)

    def get_sampler(self) -> Any | None:
        """Return the sampler that decides the order of the samples; see `accelerate.data_loader.get_sampler`."""
        return lengths.get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that decides the order of the samples; effective with the next iteration."""
        lengths.set_sampler(self.base_dataloader, sampler)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as of the batch yielded last: epoch, batches, and how to draw the order again.

        For a stateful loader (torchdata) the state of the wrapped loader, with that as an additional entry.

        Returns:
            A dict of numbers, strings, lists and dicts, which JSON can hold; and what a dataset or its sampler says of itself.
            Each process has its own.
        """
        position = resume.plain(resume.capture(self))
        if not is_stateful(self.base_dataloader):
            return {resume.KEY: position}
        return {**super().state_dict(), resume.KEY: position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next iteration yields the batches that were still to come.

        Args:
            state_dict: from `state_dict` of this or an equal loader, or of a torchdata `StatefulDataLoader`.
        """
        state = dict(state_dict)
        position = state.pop(resume.KEY, None)
        if position is None and not is_stateful(self.base_dataloader):
            raise ValueError(
                f"state_dict has no {resume.KEY!r} entry (its keys: {sorted(state)}), so it is the state of a stateful "
                "loader. Prepare this loader with use_stateful_dataloader=True to load it."
            )
        # Whoever calls this wants to go on there, whether or not the loader was being iterated.
        batches = 0 if position is None else resume.restore(self, {**position, "running": True})
        # At the beginning of an epoch only a dataset with a state of its own has something to restore; loading the
        # rest would make the wrapped loader run through the finished epoch's order once more.
        # Nor is a place in a shuffling buffer of use without the buffer: then the epoch is read again from its start.
        if _goes_on_by_itself(self.base_dataloader) and (position is None or batches or _holds_dataset_state(state)):
            super().load_state_dict(state)

    @property
    def total_batch_size(self) -> int:
        """Number of samples that all processes together receive in one step.

        Raises:
            TypeError: the batch sampler has no fixed batch size.
        """
        size = self._samples_per_step()
        if size is None:
            kind = type(lengths.innermost(lengths.batching_sampler(self))).__name__
            raise TypeError(f"total_batch_size is not known: the batch sampler ({kind}) has no batch_size.")
        return size

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset, before sharding.

        Raises:
            TypeError: the dataset has no length.
        """
        return lengths.dataset_length(self.dataset)

    def _remainder_ahead(self) -> int:
        return -1

    def _samples_per_step(self) -> int | None:
        """Samples that all processes together receive in one step; None if that varies."""
        return lengths.global_batch_size(self.base_dataloader)

    def _reads_per_step(self) -> int:
        """Batches of the wrapped loader that make one step."""
        return 1

    def _left_out(self) -> int:
        """Number of steps that this loader leaves out at the beginning of every iteration."""
        return self.skip_batches + lengths.skipped_batches(self.base_dataloader) // self._reads_per_step()

    def _skipping(self, count: int) -> PreparedLoader:
        """A view that leaves out the first batches and shares the epoch with this loader."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _is_view=True, _origin=self._origin or self)
        if lengths.is_stream(self):
            view.skip_batches = self.skip_batches + count
        else:
            view.base_dataloader = skipping(self.base_dataloader, count * self._reads_per_step())
        return view

    def _begin(self) -> Pending | None:
        """Start an iteration; returns the position that it continues at, if it continues an interrupted epoch."""
        watch = self._watch()
        if watch is not None:
            watch.before_loop(self)
        pending = resume.settle(self)
        self._progress.extra_samples = 0 if pending is None else pending.extra_samples
        self.begin()
        return pending

    def _watch(self) -> Any:
        """Who saves the run and leaves when a signal has come, if somebody does."""
        # A thread that reads ahead is not where the training is; the wrapper around this loader asks instead.
        return None if self.read_in_background else self.gradient_state._step_watch

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        watch = self._watch()
        return batches if watch is None else watch.watched(batches, self)

    def _open(self, pending: Pending | None) -> Reading:
        """Start reading the wrapped loader.

        Args:
            pending: the position to continue at, from `_begin`.
        """
        watch = self.gradient_state._step_watch
        if watch is None:
            return self._start_reading(pending)
        with watch.shielded(self.base_dataloader):
            return self._start_reading(pending)

    def _start_reading(self, pending: Pending | None) -> Reading:
        base, start, reads = self.base_dataloader, self._left_out(), self._reads_per_step()
        progress, stream = self._progress, lengths.is_stream(self.base_dataloader)
        self._seed_workers(base)
        to_drop, order, whole_state = self.skip_batches * reads, None, None
        if pending is not None:
            behind, start = (pending.batches - start) * reads, pending.batches
            if _goes_on_by_itself(base):
                to_drop = 0  # after load_state_dict the wrapped loader continues by itself
            elif stream:
                to_drop += behind
                whole_state = pending.dataset_state
            elif behind or pending.extra_samples:
                base = skipping(base, behind, pending.extra_samples)
        head = self._head() if start and self._needs_head() else []
        if knows_end(base):
            base, order = with_end(base)
        if whole_state is not None and streams.restores(base):
            base.dataset.load_state_dict(whole_state)
            to_drop = 0
        replaying, progress.replaying = progress.replaying, False
        if replaying:
            before_read = None if pending is None else pending.before_read
            batches = streams.replayed(base, progress, to_drop, before_read, reads, order)
        else:
            batches = self._iterator(base)
            batches = streams.dropped(batches, to_drop, reads) if to_drop else batches
        progress.workers_kept = progress.workers_kept or bool(base.num_workers and base.persistent_workers)
        ahead = None if self._reads_ahead else order
        if (ahead is None or (self.plan is not None and self.plan.uneven)) and not base.num_workers:
            known = pending.before_read if pending is not None and pending.before_read else []
            batches = streams.noting(batches, progress, base, reads, start, known)
        if isinstance(base.collate_fn, CountingCollate):
            batches = uncounted(batches, start, base.dataset.round_log)
        return Reading(batches, start, ahead, to_drop, head)

    # Who reads what, told when the loader was prepared.
    plan: DataPlan | None = None
    # Whether an epoch that was running when a checkpoint was saved goes on by itself after that is loaded.
    continue_after_load = True

    @property
    def _reads_ahead(self) -> bool:
        """Whether this kind of loader reads a batch before it is asked for."""
        return False

    def _needs_head(self) -> bool:
        """Whether the last step of an epoch is completed here, with samples of its first step."""
        return False

    def _head(self) -> list[Any]:
        """Read the first step of the epoch, of which the beginning is left out; nothing else notices."""
        generator, sampler = resume.shuffling_generator(self), self.get_sampler()
        drawn = None if generator is None else generator.get_state()
        seed = getattr(sampler, "replay", None)
        if seed is not None:
            sampler.replay = None  # drawn once more instead, like all that is drawn after it
        head = streams.first_step(_from_start(self.base_dataloader), self._progress.at_start, self._reads_per_step())
        if generator is not None:
            generator.set_state(drawn)
        if seed is not None:
            sampler.replay = seed
        return head

    def _seed_workers(self, base: DataLoader) -> None:
        if type(base.dataset) is seeding.SeededDataset:
            if self._progress.worker_seed is None:
                self._progress.worker_seed = torch.initial_seed()
            base.dataset.choose(self._progress.worker_seed, self._progress.epoch)

    def _iterator(self, base: DataLoader) -> Iterator[Any]:
        if base.num_workers and base.persistent_workers and base._iterator is None and self._progress.workers_kept:
            # Starting workers draws a seed. The run that goes on here had started them before, once for all epochs.
            own = base.generator
            vars(base)["generator"] = torch.Generator()
            try:
                return iter(base)
            finally:
                vars(base)["generator"] = own
        if getattr(base, "next_iter_state", None) is not None and lengths.is_stream(base):
            # torchdata opens the stream twice, first to find that the saved epoch is over; each time draws a seed.
            with randomness.kept():
                batches = iter(base)
            torch.empty((), dtype=torch.int64).random_(generator=base.generator)
            return batches
        return iter(base)

    def _keeping_states(self, reads: Iterator[Any]) -> Iterator[Any]:
        """Of a stateful loader, keep the state from before each read: that of the step yielded last.

        Args:
            reads: iterator that reads one step ahead of what is yielded.
        """
        return self._with_states(reads) if is_stateful(self.base_dataloader) else reads

    def _with_states(self, reads: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.adjust_state_dict_for_prefetch()
            try:
                step = next(reads)
            except StopIteration:
                break
            yield step
        self.adjust_state_dict_for_prefetch()


def _goes_on_by_itself(base: DataLoader) -> bool:
    """Whether a wrapped loader continues where its own `load_state_dict` puts it, with nothing lost."""
    return is_stateful(base) and not streams.has_buffer(base.dataset)


def _holds_dataset_state(state: Any) -> bool:
    """Whether a state of a `StatefulDataLoader` contains one of its dataset or of the dataset's iterator."""
    if not isinstance(state, dict):
        return False
    own = (state.get("dataset_state"), state.get("dataset_iter_state"))
    return any(part is not None for part in own) or any(_holds_dataset_state(part) for part in state.values())


def _rebuild_prepared(rebuild: Any, cls: type, state: dict[str, Any]) -> Any:
    loader = rebuild(cls, state)
    loader.gradient_state = GradientState()
    return loader


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
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            iteration=iteration,
            **kwargs,
        )
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.torch_device_mesh = torch_device_mesh

    def __iter__(self) -> Iterator[Any]:
        if (instead := resume.instead_of(self)) is not None:
            yield from instead
            return
        pending = self._begin()
        if self.rng_types is not None and not self._progress.replaying:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        try:
            self.set_epoch(self.iteration)
            resume.note_start(self)
            reading = self._open(pending)
            reading.batches = agree.together(self._keeping_states(reading.batches), self)
            yield from self._watched(self._run(reading, placer(self.device, self._non_blocking)))
        finally:
            self.end()

    def _remainder_ahead(self) -> int:
        if self._drop_last:
            return -1
        if lengths.is_stream(self.base_dataloader) and self.base_dataloader.num_workers > 1:
            return -1  # each worker ends with a batch of its own, so the total tells nothing about the last one
        size = self._samples_per_step()
        samples = lengths.samples_per_epoch(self.base_dataloader)
        # A run of another size may have consumed samples beyond whole steps.
        return -1 if size is None or samples is None else (samples - self._progress.extra_samples) % size


class SkipDataLoader(PreparedLoader):
    """A loader without its first batches, for streams: they are read and dropped.

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

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        if (instead := resume.instead_of(self)) is not None:
            yield from instead
            return
        pending = self._begin()
        try:
            resume.note_start(self)
            reading = self._open(pending)
            reading.batches = self._keeping_states(reading.batches)
            yield from self._watched(self._run(reading, None))
        finally:
            self.end()
