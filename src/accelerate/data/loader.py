"""Loaders that read their own shard: every process runs its own torch loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.data import lengths, resume
from accelerate.data.adapter import DataLoaderAdapter, as_stateful, is_stateful, variant
from accelerate.data.placement import placer
from accelerate.data.shards import SkipBatchSampler
from accelerate.data.state import DataLoaderStateMixin, Progress
from accelerate.state import GradientState
from accelerate.utils.random import synchronize_rng_states


def skipping(loader: DataLoader, count: int) -> DataLoader:
    """A copy of a torch loader with a map-style dataset that leaves out its first batches; they are not loaded."""
    if loader.batch_sampler is None:
        changes = {"sampler": SkipBatchSampler(loader.sampler, count)}
    else:
        changes = {"batch_sampler": SkipBatchSampler(loader.batch_sampler, count)}
    return as_stateful(loader, **changes) if is_stateful(loader) else variant(loader, **changes)


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

    def __reduce_ex__(self, protocol: int) -> Any:
        # The gradient state belongs to the process, not to the loader.
        rebuild, (cls, state) = super().__reduce_ex__(protocol)
        state.pop("gradient_state")
        return _rebuild_prepared, (rebuild, cls, state)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

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
            A dict of numbers, strings and tensors. Each process has its own.
        """
        position = resume.capture(self)
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
        batches = 0 if position is None else resume.restore(self, position)
        if is_stateful(self.base_dataloader):
            # At the beginning of an epoch only a dataset with a state of its own has something to restore; loading the
            # rest would make the wrapped loader run through the finished epoch's order once more.
            if position is None or batches or _holds_dataset_state(state):
                super().load_state_dict(state)
        elif position is None:
            raise ValueError(
                f"state_dict has no {resume.KEY!r} entry (its keys: {sorted(state)}), so it is the state of a stateful "
                "loader. Prepare this loader with use_stateful_dataloader=True to load it."
            )
        self._progress.resume_at = batches

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
        view.__dict__.update(self.__dict__)
        if lengths.is_stream(self):
            view.skip_batches = self.skip_batches + count
        else:
            view.base_dataloader = skipping(self.base_dataloader, count * self._reads_per_step())
        return view

    def _open(self) -> tuple[Iterator[Any], int]:
        """Start reading the wrapped loader; returns its iterator and the number of steps left out before it."""
        base, start, reads = self.base_dataloader, self._left_out(), self._reads_per_step()
        to_drop = self.skip_batches * reads
        resume_at, self._progress.resume_at = self._progress.resume_at, 0
        if is_stateful(base):
            # After load_state_dict the wrapped loader continues by itself.
            to_drop = 0 if resume_at else to_drop
        elif resume_at > start and lengths.is_stream(base):
            to_drop += (resume_at - start) * reads
        elif resume_at > start:
            base = skipping(base, (resume_at - start) * reads)
        batches = self._iterator(base)
        return islice(batches, to_drop, None) if to_drop else batches, max(start, resume_at)

    def _iterator(self, base: DataLoader) -> Iterator[Any]:
        replaying, self._progress.replaying = self._progress.replaying, False
        if not replaying:
            return iter(base)
        # A torch loader seeds its workers from the default generator, once per epoch. The epoch that goes on here has
        # done so before it was interrupted; a second time would shift all random numbers that follow.
        state = torch.get_rng_state()
        try:
            return iter(base)
        finally:
            torch.set_rng_state(state)

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
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        try:
            self.set_epoch(self.iteration)
            resume.note_start(self)
            batches, start = self._open()
            yield from self._run(self._keeping_states(batches), start, placer(self.device, self._non_blocking))
        finally:
            self.end()

    def _remainder_ahead(self) -> int:
        if self._drop_last:
            return -1
        size = self._samples_per_step()
        samples = lengths.samples_per_epoch(self.base_dataloader)
        return -1 if size is None or samples is None else samples % size


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
        self.begin()
        try:
            resume.note_start(self)
            batches, start = self._open()
            yield from self._run(self._keeping_states(batches), start, None)
        finally:
            self.end()
