"""Prepared loaders: one iteration of them, one epoch of the torch loader inside, and loaders that read their own shard."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext
from itertools import chain, count, islice
from typing import Any

import torch

from accelerate.data import adapter, generators, iterable, resume
from accelerate.data.adapter import is_stateful, is_stream, placer, skipping, variant
from accelerate.data.iterable import CountingCollate, restores, uncounted
from accelerate.data.progress import Noted, Pending
from accelerate.data.resume import ResumableLoader
from accelerate.data.samplers import EndAhead, Part, layers
from accelerate.data.stateful import with_unread_workers
from accelerate.data.workers import SeededDataset, WorkerDataset
from accelerate.extension import NO_EXTENSIONS
from accelerate.process import PartialState
from accelerate.runtime.random import synchronize_rng_states
from accelerate.state import GradientState

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
        loaded: the state from which torchdata's loader continues, until each of its workers has read a batch.
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
        self.loaded: dict[str, Any] | None = None
        self.order: EndAhead | None = None
        self.drawn: dict[str, Any] | None = None
        self.noted: dict[int, Noted] = {}
        if pending is not None:
            self._begin_at(pending)
        if adapter.knows_end(self.base):
            self.order = EndAhead(adapter.batching_sampler(self.base))
            self.base = adapter.iterating(self.base, self.order)
        with ExitStack() as contexts:
            for hook in loader._extensions.starting_workers if self.base.num_workers else ():
                contexts.enter_context(hook(self.base))
            self.batches = self._opened() if pending is None else self._opened_again()
        if self.base.num_workers and self.base.persistent_workers:
            self.progress.workers_kept = True

    def _begin_at(self, pending: Pending) -> None:
        behind, self.start = (pending.batches - self.start) * self.reads, pending.batches
        self.reread = pending.position.get("before_read") or []
        if pending.loader_continues:
            self.to_drop, self.loaded = 0, pending.loader_state
        elif not adapter.skips_by_index(self.base):
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
            with generators.kept():
                batches = iter(base)
            torch.empty((), dtype=torch.int64).random_(generator=base.generator)
            return batches
        return iter(base)

    def _opened_again(self) -> Iterator[Any]:
        with generators.kept(self.progress.at_start):
            batches = iter(self.base)
            if self.order is not None:
                self.order.draw()
            self.drawn = generators.states()
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
        """Skip the beginning of the epoch, then read again, step by step, the batches that the interrupted run had read ahead."""
        with nullcontext() if self.drawn is None else generators.kept(self.drawn):
            self._drop()
        for states in self.reread:
            with generators.kept(states):
                batches = list(islice(self.batches, self.reads))
            yield from batches

    def _drop(self) -> None:
        from tqdm.auto import tqdm

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
            random = self.reread[ahead] if ahead < len(self.reread) else generators.states()
        dataset = base.dataset.state_dict() if restores(base) else None
        state = base.state_dict() if is_stateful(base) else None
        if self.loaded is not None:
            whole = with_unread_workers(state, self.loaded)
            state, self.loaded = (state, None) if whole is None else (whole, self.loaded)
        noted[step] = Noted(random, dataset, state)
        noted.pop(step - _AHEAD, None)


# What all prepared loaders share ---------------------------------------------------------------------------------------


class PreparedLoader(ResumableLoader):
    """Everything that the loaders of this package share, except how they get their batches."""

    # Whether this kind of loader reads a batch before it is asked for.
    _reads_ahead = False
    # Whether a thread reads so many steps ahead that a run that goes on does not repeat them.
    _notes_nothing = False
    # The dataset before preparing divided it.
    _undivided: Any = None
    # Those of the Accelerator that prepared it.
    _extensions = NO_EXTENSIONS

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, gradient_state=GradientState())

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        replacement = resume.replacement_iterator(self)
        if replacement is not None:
            yield from replacement
            return
        for hook in self._extensions.between_batches:
            hook(self)
        pending = resume.take_pending_position(self)
        self._progress.extra_samples = 0 if pending is None else pending.extra_samples
        self.begin()
        try:
            self._begin_epoch(pending)
            resume.note_start(self, pending)
            base, progress = self.base_dataloader, self._progress
            if type(base.dataset) is SeededDataset:
                progress.worker_seed = base.dataset.choose(progress.worker_seed, progress.epoch, base.generator)
            batches = self._iterate(pending)
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

    def _begin_epoch(self, pending: Pending | None) -> None:
        """Do what comes before the order of the epoch is drawn."""

    def _iterate(self, pending: Pending | None) -> Iterator[Any]:
        """Yield the batches of an epoch, from the position to continue at if there is one."""
        return self._run(pending, None)

    # What is known about it ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws, for all samplers and streams that know it."""
        self._progress.epoch = epoch
        for part in layers(adapter.batching_sampler(self.base_dataloader)):
            # Asked of the class, because wrappers hand on the attributes of what they wrap; only the owner shall hear.
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
        shard = adapter.sharding(self.base_dataloader)
        if isinstance(shard, Part):
            return shard.round_log.get(self._progress.batches - 1)
        return self.plan.filled_ends if self.plan is not None and self._progress.at_end else None

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
        if order is None:
            batches = order = EndAhead(batches)
        return self._hand_out_each(batches, order, epoch.start, place)

    def _hand_out_each(
        self, batches: Iterable[Any], order: EndAhead, start: int, place: Callable[[Any], Any] | None
    ) -> Iterator[Any]:
        """Yield batches from step `start` on, of which `order` knows the last."""
        progress, active = self._progress, self.gradient_state._active
        progress.batches, progress.at_end = start, False
        own = active[-1] if active else None
        for number, batch in enumerate(batches, start + 1):
            progress.batches, is_last = number, order.ended
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
            elif self.remainder > 0 and self._shard_fills_up():
                self.remainder = (
                    0  # it has filled up nothing: the length of the data or of its sampler was an estimate
                )

    def _shard_fills_up(self) -> bool:
        shard = adapter.sharding(self.base_dataloader)
        return isinstance(shard, Part) and getattr(shard, "even_batches", True)

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
        if self._parts() > 1:
            return 0  # nothing is filled up here; what the user's sampler has filled up is counted in the last batch
        if is_stream(self.base_dataloader) and self.base_dataloader.num_workers > 1:
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
