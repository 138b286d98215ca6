"""The contract of a tracker, the base of the built-in ones, and numbers as their libraries take them."""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch

from accelerate.process import PartialState

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

PUBLIC_PATH = "accelerate.tracking"

_REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make a method of a tracker whose ``main_process_only`` is True do nothing on other ranks than the main one."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if not getattr(args[0], "main_process_only", False) or PartialState().is_main_process:
            return function(*args, **kwargs)
        return None

    return guarded


class GeneralTracker:
    """The base of all trackers. Derive from it to log to a library of your own.

    A subclass defines ``name`` (a str, by which it is found), ``requires_logging_directory`` (a bool), and the property
    ``tracker``, which returns the library's own object. It overrides the methods that it needs; all of them do nothing
    here. ``Accelerator.init_trackers`` calls ``start`` and then, when there is a configuration,
    ``store_init_configuration``; ``Accelerator.log`` calls ``log``, and ``Accelerator.end_training`` calls ``finish``.

    Attributes:
        main_process_only: Whether the methods run on the main process alone. False means every rank logs.

    Args:
        _blank: Stand for a tracker that is not there: what ``Accelerator.get_tracker`` returns on other ranks.

    Raises:
        NotImplementedError: The subclass lacks a definition; the message lists those missing.

    Example:
        >>> class ListTracker(GeneralTracker):
        ...     name = "list"
        ...     requires_logging_directory = False
        ...     tracker = property(lambda self: self.lines)
        ...     def start(self):
        ...         self.lines = []
        ...     def log(self, values, step=None, **kwargs):
        ...         self.lines.append((step, values))
        >>> tracker = ListTracker()
        >>> tracker.start()
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.tracker
        [(1, {'loss': 0.5})]
    """

    __module__ = PUBLIC_PATH

    main_process_only = True
    name: str
    requires_logging_directory: bool

    if TYPE_CHECKING:

        @property
        def tracker(self) -> Any:
            """The library's own object."""

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        # Asked of the class where possible: the property may need a run that has not started yet.
        missing = [name for name in _REQUIRED if not hasattr(type(self), name) and name not in self.__dict__]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} lacks what every tracker defines: {', '.join(f'`{name}`' for name in missing)}. "
                "Define `name` and `requires_logging_directory` in the class, and `tracker` as a property."
            )

    def start(self) -> None:
        """Start the run. Here, rather than in the constructor, the library is imported and asked for a run."""

    def store_init_configuration(self, values: dict) -> None:
        """Store the configuration of the run, names and values such as hyperparameters, which must not be changed."""

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Log names and values, with the step they belong to; ``kwargs`` are for the library."""

    def finish(self) -> None:
        """End the run, after everything logged is written."""


class LibraryTracker(GeneralTracker):
    """The base of built-in trackers. Those of this package get their public path, and run on the ranks that the tracker wants.

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
        if not cls.__module__.startswith("accelerate.trackers."):
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
        """Log one value, and say whether the library takes it."""
        raise NotImplementedError

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        getattr(self.tracker, self.ending)()


# Values as the libraries take them: numbers, with a word about what is left out

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
    """Say, once for each library and name, that a value is left out because it is not a number."""
    if (library, name) not in _mentioned:
        _mentioned.add((library, name))
        logger.warning("%s takes numbers; %r is a %s and is not logged there.", library, name, type(value).__name__)
