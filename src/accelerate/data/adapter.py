"""A torch loader from outside: questions to it, copies with other parts, and the wrapper that prepared loaders share."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from accelerate.base.imports import is_torchdata_stateful_dataloader_available
from accelerate.comm.operations import send_to_device
from accelerate.data import samplers
from accelerate.data.iterable import CollateWrapper, IterableDatasetShard
from accelerate.data.progress import Progress
from accelerate.data.samplers import (
    Part,
    ReplayableRandomSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
    innermost,
    unskipped,
)
from accelerate.data.workers import WorkerDataset
from accelerate.runtime import generators

CPU = torch.device("cpu")
# Read once: a per-loader signature inspection would be paid by every prepare().
_LOADER_PARAMETERS = tuple(inspect.signature(DataLoader.__init__).parameters)[1:]
# Names of the number of parts and of the index of a part in samplers that know their rank: torch's, lhotse's and mmengine's,
# Megatron's, this package's.
_DIVISIONS = [("num_replicas", "rank"), ("world_size", "rank")]
_DIVISIONS += [("data_parallel_size", "data_parallel_rank"), ("num_processes", "process_index")]
# Attributes of prepared loaders that are not pickled.
_OF_THE_PROCESS = ("gradient_state", "_connection", "_layouts")

# Questions -------------------------------------------------------------------------------------------------------------


def is_stream(loader: DataLoader) -> bool:
    """Whether the loader reads an iterable dataset, which has no indices."""
    return isinstance(loader.dataset, IterableDataset)


def is_stateful(loader: Any) -> bool:
    """Whether a loader can save and restore its position without help, like torchdata's `StatefulDataLoader`."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def batching_sampler(loader: DataLoader) -> Any | None:
    """The sampler that the loader iterates over: of batches, or of single indices when the loader does not batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def get_sampler(dataloader: DataLoader) -> Any | None:
    """Find the sampler that decides the order of the samples.

    Args:
        dataloader: a loader, prepared or not.

    Returns:
        The sampler of single indices below all wrapping, or None if a custom batch sampler hides it.

    Example:
        >>> type(get_sampler(DataLoader(range(8), batch_size=2, shuffle=True))).__name__
        'RandomSampler'
    """
    inner = innermost(batching_sampler(dataloader))
    if hasattr(inner, "batch_size") or inner is not dataloader.sampler:
        return getattr(inner, "sampler", None)
    return inner


def set_sampler(dataloader: DataLoader, sampler: Any) -> None:
    """Replace the sampler of single indices; ValueError if a custom batch sampler has none to replace."""
    inner = innermost(batching_sampler(dataloader))
    below = hasattr(inner, "sampler")
    if below:
        inner.sampler = sampler
    elif dataloader.batch_sampler is not None:
        raise ValueError(
            f"The batch sampler of this dataloader ({type(inner).__name__}) has no `sampler` that could be replaced. "
            "Build the batch sampler again and pass it as batch_sampler."
        )
    if not below or dataloader.batch_sampler is not None:
        # Assigning to a torch loader is refused, because its iterator would not notice; before iteration it is safe.
        vars(dataloader)["sampler"] = sampler


def sampler_kind(loader: DataLoader) -> str | None:
    """The class of the sampler that decides the order, or of the batch sampler that hides it; None for a stream."""
    if is_stream(loader):
        return None
    sampler = get_sampler(loader)
    kind = type(innermost(batching_sampler(loader)) if sampler is None else sampler)
    # One that was made replayable in place draws as the plain one does.
    return (RandomSampler if kind is ReplayableRandomSampler else kind).__name__


def division(loader: DataLoader) -> tuple[Any, int, int] | None:
    """The sampler or batch sampler that knows its rank, the number of parts it divides the data into, and which it gives."""
    for part in samplers.layers(None if is_stream(loader) else batching_sampler(loader), hidden=True):
        for names in _DIVISIONS:
            parts, index = (getattr(part, name, None) for name in names)
            if isinstance(parts, int) and isinstance(index, int) and parts > 1:
                return part, parts, index
    return None


def deals_out(loader: DataLoader, parts: int) -> bool:
    """Whether the sampler is torch's `DistributedSampler` of so many parts, which hold equally many samples, taken in turn."""
    sampler = None if is_stream(loader) else get_sampler(loader)
    if not isinstance(sampler, DistributedSampler):
        return False
    kind = type(sampler)
    as_torch = kind.__iter__ is DistributedSampler.__iter__ or kind.__module__.startswith("torchdata.")
    return as_torch and sampler.num_replicas == parts


def part_of(loader: DataLoader) -> Part | None:
    """The shard of a stream or of a batch sampler that gives this process its part; None if there is none."""
    dataset = loader.dataset
    shard = dataset if isinstance(dataset, IterableDatasetShard) else unskipped(batching_sampler(loader))[0]
    return shard if isinstance(shard, Part) else None


def shuffling_generator(loader: Any, sampler: Any) -> torch.Generator | None:
    """Return the generator that decides the order of a loader, prepared or not, with this `get_sampler`; None if there is none."""
    dataset = loader.dataset
    if isinstance(sampler, SeedableRandomSampler):
        return None
    # A map-style dataset draws its samples from its generator, not their order.
    stream = dataset if isinstance(dataset, IterableDataset) else None
    for owner, name in ((sampler, "generator"), (loader, "synchronized_generator"), (stream, "generator")):
        generator = getattr(owner, name, None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def dataset_length(dataset: Any) -> int:
    """Return the length of a dataset before it is divided; TypeError if it has none."""
    undivided = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    try:
        return len(undivided)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"The length of this dataloader is not known, because its dataset ({undivided.__class__.__name__}) has no "
            "__len__. Count steps instead of epochs, or give the dataset a __len__."
        ) from error


def known_length(measure: Callable[[Any], int], value: Any) -> int | None:
    """A length, as `measure` finds it; None if it cannot be known beforehand."""
    try:
        return measure(value)
    except (TypeError, NotImplementedError):
        return None


def samples_per_epoch(loader: DataLoader) -> int | None:
    """Return the samples that an epoch draws over all shards, by the sampler; None if not known."""
    sampler = None if is_stream(loader) else get_sampler(loader)
    return known_length(dataset_length, loader.dataset) if sampler is None else known_length(len, sampler)


def iterates_plainly(loader: DataLoader) -> bool:
    """Whether a loader yields what its `collate_fn` returns: its class adds no iteration on top."""
    iteration = type(loader).__iter__
    return iteration is DataLoader.__iter__ or iteration.__module__.partition(".")[0] == "torchdata"


def skips_by_index(loader: DataLoader) -> bool:
    """Whether a resumed epoch skips batches by their indices; otherwise it reads and drops them."""
    # A class with its own iteration may read more or fewer batches than it yields.
    return not is_stream(loader) and (iterates_plainly(loader) or not is_stateful(loader))


def knows_end(loader: DataLoader) -> bool:
    """Return whether the indices tell the end: a map-style dataset, read in this process, iterated plainly."""
    kind = type(loader)
    plain = kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
    return plain and not (loader.num_workers or is_stateful(loader) or is_stream(loader))


# Copies ----------------------------------------------------------------------------------------------------------------


def stateful_loader_class() -> type[DataLoader]:
    """Return torchdata's `StatefulDataLoader`; ImportError without torchdata 0.8 or later."""
    if not is_torchdata_stateful_dataloader_available():
        raise ImportError("use_stateful_dataloader=True needs torchdata 0.8 or later: pip install 'torchdata>=0.8.0'")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def variant(loader: DataLoader, **changes: Any) -> DataLoader:
    """Return a copy of a torch loader with other attributes, of the same class and with no workers started."""
    copied = copy.copy(loader)
    # Into the dict: DataLoader refuses assignment to these names, as a running iterator would not notice.
    vars(copied).update(changes, _iterator=None, _IterableDataset_len_called=None)
    return copied


def restarted(loader: DataLoader, **changes: Any) -> DataLoader:
    """A `variant` that begins at the first batch of an epoch, whatever state torchdata's loader was given."""
    return variant(loader, **({"next_iter_state": None} if hasattr(loader, "next_iter_state") else {}), **changes)


def as_stateful(loader: DataLoader, **changes: Any) -> DataLoader:
    """Return a loader that saves its position, of the class and with the settings of `loader`; see `variant` for `changes`.

    Raises:
        ImportError: torchdata is missing.
        TypeError: The class of `loader` cannot be combined with torchdata's.
    """
    if is_stateful(loader):
        return restarted(loader, **changes)
    kind = stateful_class(type(loader))
    attributes = {name: getattr(loader, name, None) for name in _LOADER_PARAMETERS} | changes
    # torch warns about an empty pin_memory_device, too.
    settings = {name: value for name, value in attributes.items() if value is not None and value != ""}
    if is_stream(loader):
        settings.setdefault("batch_size", None)  # its batches are ready-made
        unused = {"sampler", "batch_sampler"}
    elif "batch_sampler" in settings:
        unused = {"batch_size", "sampler", "drop_last"}
    else:
        settings["batch_size"], unused = None, {"drop_last"}
    stateful = stateful_loader_class()(**{name: value for name, value in settings.items() if name not in unused})
    if type(loader) is DataLoader:
        return stateful
    # The constructor of the subclass may take other arguments, so it is not called again.
    combined = object.__new__(kind)
    vars(combined).update(vars(loader) | vars(stateful))
    return combined


@functools.cache
def stateful_class(kind: type[DataLoader]) -> type[DataLoader]:
    """Return torchdata's loader with the methods of a subclass of torch's loader in front; TypeError if that is impossible."""
    stateful = stateful_loader_class()
    if kind is DataLoader:
        return stateful
    if kind._get_iterator is not DataLoader._get_iterator:
        raise TypeError(
            f"use_stateful_dataloader=True cannot keep {kind.__name__}._get_iterator, which replaces the iterator that has the "
            "position. Override __iter__ instead, or prepare this loader with use_stateful_dataloader=False."
        )
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce_stateful}
    return type(kind)(kind.__name__, (kind, stateful), members)


def _reduce_stateful(loader: DataLoader, protocol: int) -> Any:
    # The class is made at run time and cannot be found by its name.
    return _new_stateful, (type(loader).__bases__[0],), dict(vars(loader))


def _new_stateful(kind: type[DataLoader]) -> DataLoader:
    return object.__new__(stateful_class(kind))


def iterating(loader: DataLoader, sampler: Any) -> DataLoader:
    """A copy of a torch loader that iterates over another sampler: of batches, or of single indices, as `batching_sampler`."""
    return restarted(loader, **{"sampler" if loader.batch_sampler is None else "batch_sampler": sampler})


def skipping(loader: DataLoader, number: int, extra: int = 0) -> DataLoader:
    """A copy of a torch loader with a map-style dataset that omits its first batches; they are not loaded."""
    return iterating(loader, SkipBatchSampler(batching_sampler(loader), number, extra))


# Batches on their device -------------------------------------------------------------------------------------------------


def placer(device: torch.device | str | int | None, non_blocking: bool = False) -> Callable[[Any], Any] | None:
    """Choose, once per epoch, the function that brings a batch to `device`; None if there is nothing to do."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cpu":
        return keep_on_cpu
    return lambda batch: send_to_device(batch, device, non_blocking=non_blocking)


def keep_on_cpu(batch: Any) -> Any:
    """Return the batch itself if it is a tensor, or a flat dict, list or tuple of tensors, on the CPU; else move it."""
    kind = type(batch)
    tensors = batch.values() if kind is dict else batch if kind is list or kind is tuple else (batch,)
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or not tensor.is_cpu:
            return send_to_device(batch, CPU)
    return batch


# What prepared loaders share -------------------------------------------------------------------------------------------


class DataLoaderAdapter:
    """Wraps a torch loader and passes as it; subclasses decide how it is iterated.

    Args:
        dataset: the dataset to load from.
        use_stateful_dataloader: wrap torchdata's `StatefulDataLoader` instead of torch's loader.
        batch_sampler: as in `torch.utils.data.DataLoader`.
        **kwargs: further arguments of the loader.

    Raises:
        ImportError: `use_stateful_dataloader` without torchdata 0.8 or later.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> adapter = DataLoaderAdapter(range(6), batch_size=4)
        >>> isinstance(adapter, DataLoader), len(adapter)
        (True, 2)
    """

    __module__ = "accelerate.data_loader"

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        base = kwargs.pop("_base", None)
        if base is None:
            kind = stateful_loader_class() if use_stateful_dataloader else DataLoader
            base = kind(dataset, batch_sampler=batch_sampler, **kwargs)
        self.base_dataloader = base
        self.use_stateful_dataloader = use_stateful_dataloader
        self._yielded_state: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only. While a copy is being built there is nothing to delegate to yet.
        if name == "base_dataloader":
            raise AttributeError(name)
        try:
            return getattr(self.base_dataloader, name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    @property
    def __class__(self) -> type:
        # isinstance() falls back on this when the real type does not match; so the wrapper passes as the loader it
        # wraps while `type()` and its own methods stay those of the wrapper.
        return type(self.base_dataloader)

    def __reduce_ex__(self, protocol: int) -> Any:
        # The default would name the class above and rebuild an object of that class.
        state = {name: value for name, value in vars(self).items() if name not in _OF_THE_PROCESS}
        return object.__new__, (type(self),), state

    def __len__(self) -> int:
        try:
            return len(self.base_dataloader)
        except (TypeError, NotImplementedError):
            dataset_length(self.dataset)  # names the cause if it is the dataset
            raise

    @property
    def dataset(self) -> Any:
        """The dataset that the loader was given, or this process's part of a stream."""
        dataset = self.base_dataloader.dataset
        return dataset._inner if issubclass(type(dataset), WorkerDataset) else dataset

    @property
    def collate_fn(self) -> Any:
        """The function that makes a batch of samples, as it was given to the loader."""
        collate_fn = self.base_dataloader.collate_fn
        return collate_fn.collate_fn if isinstance(collate_fn, CollateWrapper) else collate_fn

    def get_sampler(self) -> Any | None:
        """Return the sampler that decides the order of the samples; see `accelerate.data_loader.get_sampler`."""
        return get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that decides the order of the samples; effective with the next iteration."""
        set_sampler(self.base_dataloader, sampler)

    @property
    def total_batch_size(self) -> int:
        """Number of samples that all processes together receive in one step.

        Raises:
            TypeError: the batch sampler has no fixed batch size.
        """
        size = self._samples_per_step()
        if size is None:
            kind = type(innermost(batching_sampler(self))).__name__
            raise TypeError(f"total_batch_size is not known: the batch sampler ({kind}) has no batch_size.")
        return size

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset, before sharding.

        Raises:
            TypeError: the dataset has no length.
        """
        return dataset_length(self.dataset)

    def _remainder_ahead(self) -> int:
        return -1

    def _batches_per_step(self) -> int:
        """Batches of the wrapped loader that all processes together take in a step, each counted in the size it has undivided."""
        part = part_of(self.base_dataloader)
        return 1 if part is None or part.split_batches else part.num_processes

    def _samples_per_step(self) -> int | None:
        """Samples that all processes together receive in one step; None if that varies."""
        base, part = self.base_dataloader, part_of(self.base_dataloader)
        size = getattr(batching_sampler(base) if part is None else part, "batch_size", None)
        size = base.batch_size if size is None else size
        return None if size is None else size * self._batches_per_step()

    def _data(self) -> dict[str, Any]:
        """What the loader reads: number of samples of the dataset and kind of the sampler, None where there is none."""
        base = self.base_dataloader
        return {"length": known_length(dataset_length, base.dataset), "sampler": sampler_kind(base)}

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped stateful loader, as of the batch yielded last."""
        self._require_stateful()
        if self._yielded_state is not None:
            return self._yielded_state
        # torchdata opens an unused loader to ask it, which draws random numbers and would shift those of the run. A copy
        # is opened here, and the numbers are given back.
        with generators.kept():
            return variant(self.base_dataloader).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand a state from `state_dict` to the wrapped stateful loader; the next iteration continues there."""
        self._require_stateful()
        self.base_dataloader.load_state_dict(state_dict)
        self._yielded_state = None

    def adjust_state_dict_for_prefetch(self) -> None:
        """Take the state that `state_dict` reports now, before the wrapped loader reads the next batch ahead.

        Prepared loaders know whether a batch is the last one because they read one batch ahead. A state taken after
        that would omit the batch read ahead on resuming.
        """
        if is_stateful(self.base_dataloader):
            self._yielded_state = self.base_dataloader.state_dict()

    def _require_stateful(self) -> None:
        if not is_stateful(self.base_dataloader):
            raise AttributeError(
                f"The wrapped {type(self.base_dataloader).__name__} has no state_dict. Build the loader with "
                "use_stateful_dataloader=True (needs torchdata 0.8.0 or later)."
            )


class DataLoaderStateMixin:
    """Loop state of a loader: it tells `GradientState` that it is being iterated, and its position.

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

    def reset(self) -> None:
        """Forget the end and the remainder of the last iteration."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start an iteration: reset, work out the remainder, become the active loader."""
        self.reset()
        self.remainder = self._remainder_ahead()
        self._progress.running = True
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Finish an iteration: the loader that was active before becomes active again."""
        self._progress.running = False
        self.gradient_state._remove_dataloader(self)

    @functools.cached_property
    def _progress(self) -> Progress:
        # Loaders of this package set it when they are built; a class of a library that mixes this in need not know of it.
        return Progress()

    def _remainder_ahead(self) -> int:
        """The remainder as far as it can be known before the first batch; -1 if it cannot."""
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
