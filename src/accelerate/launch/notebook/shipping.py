"""How a function reaches the processes that run it: they are forked and have it, or it is sent to fresh ones."""

import importlib.util
import io
import linecache
import multiprocessing
import os
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.launch.notebook.request import name_of

FORK, SPAWN = "fork", "spawn"
# What an entry of `linecache` holds, by position: its time of change, which text that is in no file has not, and its lines.
_TIME, _LINES = 1, 2


class CannotSendError(RuntimeError):
    """The function cannot be sent to another process."""


@dataclass(frozen=True)
class Shipment:
    """A function on its way.

    Attributes:
        method: "fork" or "spawn".
        function: what a process calls.
        args: with which arguments.
    """

    method: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


class ByValue:
    """A function and its arguments as bytes of cloudpickle, which puts what is defined in `__main__` in there itself.

    Args:
        function: what is to be called.
        args: with which arguments.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        import cloudpickle

        self.__name__ = name_of(function)
        self.__qualname__ = self.__name__
        self._bytes = cloudpickle.dumps((function, tuple(args)))
        self._cells = dict(_cells())

    def __call__(self) -> None:
        """Call the function."""
        import cloudpickle

        # For the lines of a traceback.
        linecache.cache.update(self._cells)
        function, args = cloudpickle.loads(self._bytes)
        function(*args)


def _cells() -> Iterator[tuple[str, Any]]:
    for name, entry in list(linecache.cache.items()):
        if len(entry) > _LINES and entry[_TIME] is None and not name.startswith("<frozen"):
            yield name, entry


def fork(function: Callable[..., Any], args: Sequence[Any]) -> Shipment:
    """Return a function for forked processes, which have all that this one has.

    Args:
        function: what is to be called.
        args: with which arguments.
    """
    return Shipment(FORK, function, tuple(args))


def spawn(function: Callable[..., Any], args: Sequence[Any]) -> Shipment:
    """Return a function for fresh processes: by its name if they can import it, else by value.

    Args:
        function: what is to be called.
        args: with which arguments.

    Raises:
        CannotSendError: neither is possible; the message says why, and what to do.
    """
    by_name, why = _fits_by_name(function, args)
    if by_name:
        return Shipment(SPAWN, function, tuple(args))
    name = name_of(function)
    if importlib.util.find_spec("cloudpickle") is None:
        raise CannotSendError(
            f"{name} cannot be sent to a fresh process ({why}). Install cloudpickle (pip install cloudpickle), or put {name} "
            "into a .py file and import it from there."
        )
    try:
        return Shipment(SPAWN, ByValue(function, args), ())
    except Exception as error:  # cloudpickle passes on whatever the objects raise
        raise CannotSendError(
            f"{name} cannot be sent to a fresh process: {type(error).__name__}: {error}.{_hindrance(function, args)} Build such "
            f"things inside {name}, or put it into a .py file and import it from there."
        ) from None


def _fits_by_name(function: Callable[..., Any], args: Sequence[Any]) -> tuple[bool, str]:
    """Tell whether plain pickling does, in the eyes of a fresh process; and if not, why."""
    sink = io.BytesIO()
    try:
        _Probe(sink).dump((function, tuple(args)))
    except Exception as error:  # pickling passes on whatever the objects raise
        return False, f"{type(error).__name__}: {error}"
    if not main_is_importable() and "__main__" in _strings(sink.getvalue()):
        return False, "it is defined in a cell, or uses something that is"
    return True, ""


class _Probe(pickle.Pickler):
    """Pickles, leaving out what torch and multiprocessing hand over in their own ways, which only work in earnest."""

    def persistent_id(self, value: Any) -> str | None:
        torch = sys.modules["torch"]
        if isinstance(value, (torch.Tensor, torch.UntypedStorage)) or type(value).__module__.startswith(
            "multiprocessing."
        ):
            return "left out"
        return None


def _strings(pickled: bytes) -> set[str]:
    found = set()
    for _, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, str):
            found.update(argument.split(" "))  # the old operation has module and name in one
    return found


def main_is_importable() -> bool:
    """Tell whether a fresh process can import the main program: a script or a module, but no notebook and no console."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path) and "IPython" not in str(getattr(main, "__loader__", ""))


def is_importing_main() -> bool:
    """Tell whether this is a fresh process that is still importing the main program of its parent."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _hindrance(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return a sentence about what could not be sent, or nothing."""
    import cloudpickle

    named = {f"args[{number}]": value for number, value in enumerate(args)}
    code = getattr(function, "__code__", None)
    for name in getattr(code, "co_names", ()):
        if name in getattr(function, "__globals__", {}):
            named[name] = function.__globals__[name]
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False
    ):
        named[name] = cell.cell_contents
    for name, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # as above
            return f" The reason is {name}, a {type(value).__name__}."
    return ""
