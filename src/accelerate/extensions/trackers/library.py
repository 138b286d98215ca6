"""The base of the trackers of libraries, and values as these take them."""

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from accelerate.extensions.trackers.base import PUBLIC_PATH, GeneralTracker, on_main_process

logger = logging.getLogger(__name__)

_PACKAGE = f"{__package__}."


class LibraryTracker(GeneralTracker):
    """The base of built-in trackers. Trackers of this package get their public path, and run on the ranks that they request.

    Attributes:
        handle: The name of the attribute that holds the library's object; it is None until the tracker has started.
        ending: The name of the method of that object which ends the run.
        library: The name of the module that ``_library`` returns, whatever ``name`` a subclass has.
    """

    requires_logging_directory = False
    handle = "writer"
    ending = "close"
    library: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith(_PACKAGE):
            return  # a class of the user's own, who says what runs where
        cls.__module__ = PUBLIC_PATH
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, on_main_process(member))

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        setattr(self, self.handle, None)

    @property
    def tracker(self) -> Any:
        """The library's own object of the run."""
        return getattr(self, self.handle)

    def _library(self) -> Any:
        """Return the tracker's library, which is imported when it is first needed."""
        return importlib.import_module(self.library)

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log the values that the library takes, and warn once about each other name; ``kwargs`` are for the library."""
        for name, value in values.items():
            if not self._log_one(name, number_or_same(value), step, kwargs):
                mention(self.name, name, value)

    def _log_one(self, name: str, value: Any, step: int | None, kwargs: dict[str, Any]) -> bool:
        """Log one value, and return whether the library takes it."""
        raise NotImplementedError

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        getattr(self.tracker, self.ending)()


# Numbers, as the libraries accept them. A skipped value is logged once.

_mentioned: set[tuple[str, str]] = set()


def number_or_same(value: Any) -> Any:
    """Return a tensor or array of one element that is a number as a Python number, and anything else as it is."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        try:
            number = value.item()
        except (RuntimeError, ValueError, TypeError):  # more than one element
            return value
        return number if isinstance(number, (int, float)) else value
    return value


def plain(value: Any) -> Any:
    """Return a configuration as numbers, text, lists and dicts, which every library can store; text for anything else."""
    value = number_or_same(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def numbers_of(values: dict[str, Any], library: str) -> dict[str, int | float]:
    """Return the values that are numbers; each of the others is mentioned once in the log, with the library's name."""
    numbers = {}
    for name, value in values.items():
        number = number_or_same(value)
        if isinstance(number, (int, float)):
            numbers[name] = number
        else:
            mention(library, name, value)
    return numbers


def mention(library: str, name: str, value: Any) -> None:
    """Log, once for each library and name, that a value is skipped because it is not a number."""
    if (library, name) not in _mentioned:
        _mentioned.add((library, name))
        logger.warning("%s takes numbers; %r is a %s and is not logged there.", library, name, type(value).__name__)
