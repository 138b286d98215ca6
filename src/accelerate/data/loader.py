"""Prepared loaders: one iteration of them, and those that read their own shard, each process with its own torch loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from accelerate.data import adapter, iterable, resume
from accelerate.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, is_stream, placer, skipping
from accelerate.data.epoch import EpochIterator
from accelerate.data.iterable import IterableDatasetShard, has_buffer
from accelerate.data.resume import Pending, Progress, is_stateful
from accelerate.data.samplers import BatchSamplerShard, EndAhead, ReplayableRandomSampler, look_ahead
from accelerate.data.workers import SeededDataset
from accelerate.state import GradientState
from accelerate.utils.random import synchronize_rng_states

if TYPE_CHECKING:
    from accelerate.data.plan import DataPlan


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Everything that the loaders of this package share apart from how they get their batches."""

    # Who reads what, worked out when the loader was prepared.
    plan: DataPlan | None = None
    # Whether an epoch that was running when a checkpoint was saved goes on by itself after that is loaded.
    continue_after_load = True
    # Whether this kind of loader reads a batch before it is asked for.
    _reads_ahead = False
    # Whether a thread reads so many steps ahead that a run that goes on does not repeat them.
    _notes_nothing = False

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
        replacement = resume.replacement_iterator(self)
        if replacement is not None:
            yield from replacement
            return
        watch = self.gradient_state._step_watch
        if watch is not None:
            watch.leave_if_due(self)
        pending = resume.take_pending_position(self)
        self._progress.extra_samples = 0 if pending is None else pending.extra_samples
        self.begin()
        try:
            self._begin_epoch(pending)
            resume.note_start(self, pending)
            dataset, progress = self.base_dataloader.dataset, self._progress
            if type(dataset) is SeededDataset:
                progress.worker_seed = dataset.choose(progress.worker_seed, progress.epoch)
            batches = self._iterate(pending)
            yield from batches if watch is None else watch.watched(batches, self)
        finally:
            self.end()

    def _begin_epoch(self, pending: Pending | None) -> None:
        """Do what comes before the order of the epoch is drawn."""

    def _iterate(self, pending: Pending | None) -> Iterator[Any]:
        """Yield the batches of an epoch, from the position to continue at if there is one."""
        raise NotImplementedError

    # What is known about it ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws, for all samplers and streams that know it."""
        self._progress.epoch = epoch
        part = adapter.batching_sampler(self.base_dataloader)
        while part is not None:
            # Asked of the class, because wrappers hand on the attributes of what they wrap; only the owner shall hear.
            if hasattr(type(part), "set_epoch"):
                part.set_epoch(epoch)
            part = part.batch_sampler if hasattr(part, "batch_sampler") else getattr(part, "sampler", None)
        dataset = self.base_dataloader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)

    @property
    def batches_yielded(self) -> int:
        """Batches of the running epoch that this process has yielded, skipped ones included; 0 between epochs."""
        return self._progress.batches

    @property
    def batch_counts(self) -> tuple[int, ...] | None:
        """Real samples in each shard's batch of the round yielded last; None if all are real."""
        shard = adapter.sharding(self.base_dataloader)
        if isinstance(shard, (BatchSamplerShard, IterableDatasetShard)):
            return shard.round_log.get(self._progress.batches - 1)
        return self.plan.filled_ends if self.plan is not None and self._progress.at_end else None

    def _parts(self) -> int:
        """How many parts data with indices came in, of which the wrapped loader knows its own alone; 1 where that is not so."""
        base = self.base_dataloader
        known = self.plan is None or is_stream(base) or isinstance(adapter.sharding(base), BatchSamplerShard)
        return 1 if known else self.plan.parts

    def _batches_per_step(self) -> int:
        return super()._batches_per_step() * self._parts()

    def _reads_per_step(self) -> int:
        """Batches of the wrapped loader that this process reads for one step."""
        return 1

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position and order as of the batch yielded last, of this process.

        JSON can hold it, but for what a dataset or its sampler says of itself. A stateful loader's state is around it.
        """
        noted = (self._progress.noted or {}).get(self._progress.batches + 1)
        if noted is not None and noted.loader is not None:
            state = noted.loader
        else:
            state = super().state_dict() if is_stateful(self.base_dataloader) else {}
        # What a dataset says of itself stays as it is.
        position = resume.capture(self)
        own = {name: position.pop(name) for name in ("dataset_state",) if name in position}
        return {**state, resume.KEY: resume.plain_states(position) | own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration yield the batches that were still to come in `state_dict`."""
        state = dict(state_dict)
        position = state.pop(resume.KEY, None)
        if position is None and not is_stateful(self.base_dataloader):
            raise ValueError(
                f"state_dict has no {resume.KEY!r} entry (its keys: {sorted(state)}), so it is the state of a stateful "
                "loader. Prepare this loader with use_stateful_dataloader=True to load it."
            )
        # A caller of this function wants to go on there, whether or not the loader was being iterated.
        batches = 0 if position is None else resume.restore(self, {**position, "running": True})
        # At the beginning of an epoch only a dataset with a state of its own has something to restore; loading the
        # rest would make the wrapped loader run through the finished epoch's order once more.
        # Nor is a place in a shuffling buffer of use without the buffer: then the epoch is read again from its start.
        if self._goes_on_by_itself() and (position is None or batches or adapter.holds_dataset_state(state)):
            super().load_state_dict(state)

    def _goes_on_by_itself(self) -> bool:
        """Whether the wrapped loader continues where its own `load_state_dict` puts it, with nothing lost."""
        return is_stateful(self.base_dataloader) and not has_buffer(self.base_dataloader.dataset)

    def _left_out(self) -> int:
        """Number of steps that this loader leaves out at the beginning of every iteration."""
        _, skipped = adapter.unskipped(adapter.batching_sampler(self.base_dataloader))
        return self.skip_batches + skipped // self._reads_per_step()

    def _skipping(self, number: int) -> PreparedLoader:
        """A view that leaves out the first batches and shares the epoch with this loader."""
        view = object.__new__(type(self))
        vars(view).update(vars(self), _origin=self if self._origin is None else self._origin)
        if is_stream(self):
            view.skip_batches = self.skip_batches + number
        else:
            view.base_dataloader = skipping(self.base_dataloader, number * self._reads_per_step())
        return view

    def _ends_unevenly(self) -> bool:
        return self.plan is not None and self.plan.uneven

    # Handing out -----------------------------------------------------------------------------------------------------

    def _run(
        self, pending: Pending | None, place: Callable[[Any], Any] | None, through: Callable[..., Any] | None = None
    ) -> Iterator[Any]:
        """Yield the batches of an epoch, each as soon as it is known whether it is the last one."""
        epoch = EpochIterator(self, pending)
        batches, order = iter(epoch), epoch.order
        if through is not None:  # which reads ahead, so that the indices are further than the batches
            batches, order = through(batches), None
        # Where the indices tell the end, no batch is read before its turn: what the dataset draws at random comes in the order
        # of a plain loop.
        return self._hand_out_each(look_ahead(batches) if order is None else batches, epoch.start, place, order)

    def _hand_out_each(
        self, items: Iterator[Any], start: int, place: Callable[[Any], Any] | None, order: EndAhead | None = None
    ) -> Iterator[Any]:
        """Yield batches from step `start` on; they come in pairs with whether they are the last, unless the indices tell."""
        progress, active = self._progress, self.gradient_state._active
        progress.batches, progress.at_end = start, False
        own = active[-1] if active else None
        for number, item in enumerate(items, start + 1):
            if order is None:
                batch, is_last = item
            else:
                batch, is_last = item, order.ended
            progress.batches = number
            if is_last or self.end_of_dataloader or not active or active[-1] is not own:  # not for every batch
                self._hand_out(is_last)
            yield batch if place is None else place(batch)
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

    def _finish_epoch(self) -> None:
        progress = self._progress
        if progress.noted is not None:  # this process has read the data
            self.adjust_state_dict_for_prefetch()
        progress.noted = None
        progress.batches = progress.extra_samples = 0
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

    def _begin_epoch(self, pending: Pending | None) -> None:
        if self.rng_types is not None and pending is None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.set_epoch(self.iteration)

    def _iterate(self, pending: Pending | None) -> Iterator[Any]:
        place = placer(self.device, self._non_blocking)
        return self._run(pending, place, iterable.in_step if self._ends_unevenly() else None)

    def _remainder_ahead(self) -> int:
        if self._drop_last:
            return -1
        stream = is_stream(self.base_dataloader)
        if self._parts() > 1 or (stream and self.plan is not None and self.plan.parts > 1):
            return 0  # nothing is filled up here; what the user's sampler has filled up is counted in the last batch
        if stream and self.base_dataloader.num_workers > 1:
            return -1  # each worker ends with a batch of its own, so the total tells nothing about the last one
        size = self._samples_per_step()
        samples = adapter.samples_per_epoch(self.base_dataloader)
        # A run of another size may have consumed samples beyond whole steps.
        return -1 if size is None or samples is None else (samples - self._progress.extra_samples) % size


class SkipDataLoader(PreparedLoader):
    """A loader without its first batches, for streams: they are read and dropped.

    `prepare` shards it like the loader below it; each process leaves out so many batches of its own.

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

    def _iterate(self, pending: Pending | None) -> Iterator[Any]:
        return self._run(pending, None)
