"""The dictionaries that every instance of a state class shares, and how a reset replaces them.

A state object binds one of these dictionaries as its `__dict__` when it is built. A reset makes a new, empty one current
and leaves the old one to the objects bound to it, so an object that holds a state keeps working after a reset.
"""

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Slot:
    """Holds the dictionary that newly built state objects bind.

    Args:
        thread_local: give every thread a dictionary of its own, for devices that run one worker per thread (older TPUs).

    Example:
        >>> slot = Slot()
        >>> old = slot.current
        >>> slot.renew() is slot.current, old is slot.current
        (True, False)
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._holder: Any = threading.local() if thread_local else _Holder()
        self._shown: tuple[type, str, Any] | None = None

    def shown_as(self, owner: type, name: str) -> None:
        """Show the slot as a class attribute; a dictionary that a caller assigns to the attribute is current from then on.

        Args:
            owner: the class.
            name: the attribute, which holds the descriptor that shows the slot.
        """
        self._shown = owner, name, vars(owner)[name]

    def _assigned(self) -> dict[str, Any] | None:
        if self._shown is None:
            return None
        owner, name, descriptor = self._shown
        values = vars(owner).get(name, descriptor)
        return None if values is descriptor else values

    @property
    def current(self) -> dict[str, Any]:
        """The dictionary in force; empty until a state is built."""
        assigned = self._assigned()
        if assigned is not None:
            return assigned
        try:
            return self._holder.values
        except AttributeError:
            return self.renew()

    def renew(self) -> dict[str, Any]:
        """Make a new, empty dictionary current and return it; objects bound to the old one keep that."""
        self.bind({})
        return self.current

    def bind(self, values: dict[str, Any]) -> None:
        """Make `values` itself the current dictionary."""
        if self._shown is not None and self._assigned() is not None:
            owner, name, _ = self._shown
            setattr(owner, name, values)  # the slot's own stays, for the caller who puts the attribute back
        else:
            self._holder.values = values

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the current dictionary back at the end of a `with` block, whatever happened in it."""
        before = self.current
        try:
            yield
        finally:
            self.bind(before)


class _Holder:
    values: dict[str, Any]


# Only TPU generations before v4 run several workers as threads of one process; a thread there is a rank of its own.
_WORKERS_ARE_THREADS = os.environ.get("PJRT_DEVICE") == "TPU" and importlib.util.find_spec("torch_xla") is not None

process = Slot(_WORKERS_ARE_THREADS)
accelerator = Slot(_WORKERS_ARE_THREADS)
gradient = Slot(_WORKERS_ARE_THREADS)

_SLOTS = {"process": process, "accelerator": accelerator, "gradient": gradient}
_builders: dict[str, Callable[[], Any]] = {}


def register_builder(slot_name: str, builder: Callable[[], Any]) -> None:
    """Say what fills a slot on demand, so that lower layers reach a state class without importing it.

    Args:
        slot_name: "process", "accelerator" or "gradient".
        builder: called without arguments; it must fill the slot's current dictionary.

    Raises:
        ValueError: there is no such slot.
    """
    if slot_name not in _SLOTS:
        raise ValueError(f"There is no slot {slot_name!r}; the slots are {', '.join(_SLOTS)}.")
    _builders[slot_name] = builder


def ensure(slot_name: str) -> dict[str, Any]:
    """Return a slot's dictionary, built with the defaults if it is empty.

    Args:
        slot_name: "process", "accelerator" or "gradient".

    Raises:
        RuntimeError: the dictionary is empty and the module that could fill it was not imported.
    """
    values = _SLOTS[slot_name].current
    if not values:
        builder = _builders.get(slot_name)
        if builder is None:
            raise RuntimeError(f"No {slot_name} state exists. Build `Accelerator()` or `PartialState()` first.")
        builder()
        values = _SLOTS[slot_name].current
    return values
