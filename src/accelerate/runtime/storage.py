"""The dictionaries that every instance of a state class shares, and how a reset replaces them.

A state object binds one of these dictionaries as its `__dict__` when it is built. A reset makes a new, empty one current
and leaves the old one to the objects bound to it. So an object that holds a state keeps working after a reset.
"""

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class Slot:
    """Holds the dictionary that newly built state objects bind; one for every thread where workers are threads."""

    def __init__(self, thread_local: bool = False) -> None:
        self._holder: Any = threading.local() if thread_local else SimpleNamespace()
        self._shown: tuple[type, str, Any] | None = None

    def shown_as(self, owner: type, name: str) -> None:
        """Show the slot as a class attribute; a dictionary that a caller assigns to it is current from then on."""
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

    def filled(self) -> dict[str, Any]:
        """Return the current dictionary, built with defaults if it is empty: lower layers import no state class."""
        if not self.current:
            if self._shown is None:
                raise RuntimeError("No state of the process exists. Build `Accelerator()` or `PartialState()` first.")
            self._shown[0]()
        return self.current

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


# Only TPU generations before v4 run several workers as threads of one process; each such thread is a rank.
_WORKERS_ARE_THREADS = os.environ.get("PJRT_DEVICE") == "TPU" and importlib.util.find_spec("torch_xla") is not None

process = Slot(_WORKERS_ARE_THREADS)
accelerator = Slot(_WORKERS_ARE_THREADS)
gradient = Slot(_WORKERS_ARE_THREADS)
