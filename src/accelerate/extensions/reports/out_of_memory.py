"""The report of a program that runs out of memory: the contents of its rank's memory, and ways to reduce them."""

import weakref
from typing import Any

from accelerate.devices.memory import should_reduce_batch_size
from accelerate.extension import Extension
from accelerate.runtime import failure
from accelerate.runtime.run import Run

_LIVE: "weakref.WeakKeyDictionary[Run, None]" = weakref.WeakKeyDictionary()  # the newest is last


class OutOfMemory(Extension):
    """Explains an error that ends the program, if it means that memory ran out, for as long as an Accelerator lives."""

    @classmethod
    def attach(cls, run: Any) -> None:
        """Remember an Accelerator. It gets no extension, because no hook is needed."""
        _LIVE[run] = None
        failure.watch(explain)


def newest() -> Run | None:
    """Return the last Accelerator that was made and still lives. Not a collective."""
    return next(iter(reversed(list(_LIVE))), None)


def explain(error: BaseException) -> str:
    """Return the addition to an error that ends the program; an empty text for other errors.

    Not a collective.
    """
    runs = list(_LIVE)
    if not runs or not isinstance(error, Exception) or not should_reduce_batch_size(error):
        return ""
    from accelerate.extensions.reports import memory

    return memory.explain(runs)
