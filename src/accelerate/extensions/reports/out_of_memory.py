"""What a run is told of its memory: its contents when it runs out, ways to reduce them, and the cost of unsharded gradients."""

import weakref
from typing import Any

from accelerate.devices.memory import should_reduce_batch_size
from accelerate.extension import Extension
from accelerate.logging import get_logger
from accelerate.runtime import failure
from accelerate.runtime.run import Run

logger = get_logger(__name__)
_LIVE: "weakref.WeakKeyDictionary[Run, None]" = weakref.WeakKeyDictionary()  # the newest is last


class MemoryNotes(Extension):
    """Explains an error that ends the program, if it means that memory ran out, for as long as an Accelerator lives."""

    @classmethod
    def attach(cls, run: Any) -> "MemoryNotes":
        """Remember an Accelerator. Not a collective."""
        _LIVE[run] = None
        failure.watch(explain)
        return cls(run)

    def unsharded_gradients(self, model: Any) -> None:
        """Log the memory that they take on each rank. Not a collective."""
        from accelerate.extensions.reports import footprint

        if note := footprint.no_sync_memory_note(model):
            logger.warning(note)


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
