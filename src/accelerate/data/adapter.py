"""The wrapper around a torch loader that prepared loaders have in common."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch.utils.data import DataLoader

from accelerate.data import lengths, randomness
from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

# Read once: a per-loader signature inspection would be paid by every prepare().
_LOADER_PARAMETERS = tuple(name for name in inspect.signature(DataLoader.__init__).parameters if name != "self")


def stateful_loader_class() -> type[DataLoader]:
    """Return torchdata's `StatefulDataLoader`.

    Raises:
        ImportError: torchdata 0.8 or later is not installed.
    """
    if not is_torchdata_stateful_dataloader_available():
        raise ImportError(
            "use_stateful_dataloader=True needs torchdata 0.8.0 or later: pip install 'torchdata>=0.8.0'"
        )
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def is_stateful(loader: Any) -> bool:
    """Whether a loader can save and restore its position by itself, like torchdata's `StatefulDataLoader`."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def iterates_plainly(loader: DataLoader) -> bool:
    """Whether a loader yields what its `collate_fn` returns: its class has no iteration of its own on top."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ or kind.__module__.partition(".")[0] == "torchdata"


def loader_arguments(loader: DataLoader) -> dict[str, Any]:
    """The arguments that build a loader like this one, apart from the dataset and the samplers."""
    skipped = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    arguments = {}
    for name in _LOADER_PARAMETERS:
        value = getattr(loader, name, None)
        # Unset ones are left out: torch warns about some of them (pin_memory_device) even when they are empty.
        if name not in skipped and value not in (None, "", False):
            arguments[name] = value
    if hasattr(loader, "in_order"):
        arguments["in_order"] = loader.in_order
    if not loader.num_workers:
        arguments.pop("persistent_workers", None)
        arguments.pop("prefetch_factor", None)
    return arguments


def variant(loader: DataLoader, **changes: Any) -> DataLoader:
    """A copy of a torch loader with other parts, for instance another `batch_sampler`.

    A copy keeps the class of a custom loader and settings it added, which building a new `DataLoader` would lose.

    Args:
        loader: the loader to copy; it is not changed.
        **changes: attributes of the copy.

    Returns:
        The copy, with no workers started.
    """
    twin = copy.copy(loader)
    # Into the dict: DataLoader refuses assignment to these names, as a running iterator would not notice.
    vars(twin).update(changes, _iterator=None, _IterableDataset_len_called=None)
    return twin


def as_stateful(loader: DataLoader, **changes: Any) -> DataLoader:
    """A torchdata `StatefulDataLoader` with the settings of `loader`; see `variant` for `changes`.

    Raises:
        ImportError: torchdata 0.8 or later is not installed.
    """
    stateful = stateful_loader_class()
    if isinstance(loader, stateful):
        twin = variant(loader, **changes)
        twin.next_iter_state = None
        return twin
    parts = {
        name: getattr(loader, name) for name in ("dataset", "batch_size", "sampler", "batch_sampler", "drop_last")
    }
    settings = loader_arguments(loader)
    for name, value in changes.items():
        (parts if name in parts else settings)[name] = value
    batch_size, drop_last = parts.pop("batch_size"), parts.pop("drop_last")
    if lengths.is_stream(loader):
        parts = {"dataset": parts["dataset"], "batch_size": batch_size, "drop_last": drop_last}
    elif parts["batch_sampler"] is None:
        parts |= {"batch_size": None}
    else:
        del parts["sampler"]
    return stateful(**parts, **settings)


class DataLoaderAdapter:
    """Wraps a torch loader, looks like it, and lets subclasses decide how it is iterated.

    `isinstance` sees the class of the wrapped loader (`torch.utils.data.DataLoader`, or torchdata's
    `StatefulDataLoader`), and attributes that the wrapper does not have are those of the wrapped loader.

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
        # The default would name the class above and rebuild something else than what was saved.
        return _rebuild, (type(self), self.__dict__.copy())

    def __len__(self) -> int:
        try:
            return len(self.base_dataloader)
        except (TypeError, NotImplementedError):
            lengths.dataset_length(self.dataset)  # names the cause if it is the dataset
            raise

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped stateful loader, as of the batch yielded last."""
        self._require_stateful()
        if self._yielded_state is not None:
            return self._yielded_state
        # torchdata opens an unused loader to ask it, which draws random numbers and would shift those of the run. A copy
        # is opened here, and the numbers are given back.
        with randomness.kept():
            return variant(self.base_dataloader).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand a state from `state_dict` to the wrapped stateful loader; the next iteration continues there."""
        self._require_stateful()
        self.base_dataloader.load_state_dict(state_dict)
        self._yielded_state = None

    def adjust_state_dict_for_prefetch(self) -> None:
        """Take the state that `state_dict` reports now, before the wrapped loader reads the next batch ahead.

        Prepared loaders know whether a batch is the last one because they read one batch ahead. A state taken after
        that would leave out the batch read ahead on resuming.
        """
        if is_stateful(self.base_dataloader):
            self._yielded_state = self.base_dataloader.state_dict()

    def _require_stateful(self) -> None:
        if not is_stateful(self.base_dataloader):
            raise AttributeError(
                f"The wrapped {type(self.base_dataloader).__name__} has no state_dict. Build the loader with "
                "use_stateful_dataloader=True (needs torchdata 0.8.0 or later)."
            )


def _rebuild(cls: type, state: dict[str, Any]) -> Any:
    loader = object.__new__(cls)
    loader.__dict__.update(state)
    return loader
