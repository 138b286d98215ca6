"""The contract of a tracker."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accelerate.process import PartialState

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
    """The base of all trackers. Derive from it to log to another library.

    A subclass defines ``name`` (a str, by which it is found), ``requires_logging_directory`` (a bool), and the property
    ``tracker``, which returns the library's own object. It overrides the methods that it needs; all of them do nothing
    here. ``Accelerator.init_trackers`` calls ``start`` and then, when there is a configuration,
    ``store_init_configuration``; ``Accelerator.log`` calls ``log``, and ``Accelerator.end_training`` calls ``finish``.

    No method is a collective.

    Attributes:
        main_process_only: Whether the methods run only on the main process. False means every rank logs.

    Args:
        _blank: Make a tracker without a library, such as ``Accelerator.get_tracker`` returns on other ranks.

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
                f"{type(self).__name__} lacks definitions that every tracker needs: {', '.join(f'`{name}`' for name in missing)}. "
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
