"""A dictionary as a class attribute, which programs import from `accelerate.state`."""

import threading
import weakref
from typing import Any


class ThreadLocalSharedDict(threading.local):
    """A class attribute that holds one dictionary per thread, or one for all of them.

    The state classes keep theirs in `accelerate.runtime.storage`; this class serves code that shares state in the same way.

    Args:
        thread_local: give every thread a separate dictionary.
    """

    __module__ = "accelerate.state"  # the public path

    def __init__(self, thread_local: bool = False) -> None:
        # Runs once per thread, on the same object: data common to the threads must be kept elsewhere.
        self._values: dict[str, Any] = {} if thread_local else _common.setdefault(self, {})

    def __get__(self, obj: Any, objtype: type | None = None) -> dict[str, Any]:
        return self._values

    def __set__(self, obj: Any, value: dict[str, Any]) -> None:
        self._values.clear()
        self._values.update(value)


_common: weakref.WeakKeyDictionary[ThreadLocalSharedDict, dict[str, Any]] = weakref.WeakKeyDictionary()
