"""The processes that a process works together with: hooks of extensions, and what is known of ranks that do not come."""

import contextlib
import time
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from accelerate.extension import all_specs, imported


class MissingRanks:
    """Finds out about ranks that others wait for. This class only knows for how long; that of an extension looks where they are.

    Attributes:
        began: The time at which the search began.
        latest: What is known of each rank; as text, it ends a sentence that begins with the rank.
    """

    def __init__(self, ranks: Collection[int], again_s: float, limit_s: float) -> None:
        self.began = self._next = time.monotonic()
        self._again_s, self._limit_s = again_s, limit_s
        self.latest: dict[int, Any] = dict.fromkeys(ranks, f"has not come (the limit is {limit_s:.0f} s)")

    def news(self) -> bool:
        """Continue the search; return whether `latest` may have changed. Does not wait."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._again_s
        return True

    def gone(self, ranks: Collection[int]) -> list[int]:
        """Return which of some ranks will never come."""
        return list(ranks) if time.monotonic() - self.began > self._limit_s else []

    def stuck(self, missing: list[int]) -> list[int]:
        """Return which of the missing ranks wait for the ranks that have come."""
        return []


class ProcessExtension:
    """What an extension does for a process that works together with others, with or without an Accelerator.

    Override the hooks that it needs. A process has one instance; a single process has none.
    """

    def joining(self, store: Any, rank: int, world_size: int) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which this process waits for the others to join the process group.

        Collective: call on every rank.
        """
        return contextlib.nullcontext()

    def joined(self, store: Any, rank: int, world_size: int) -> None:
        """Act once there is a process group, and before ranks meet in a barrier; repeated calls must cost little.

        Collective: call on every rank, in the thread that trains.
        """

    def search(self, store: Any, ranks: Collection[int], again_s: float) -> MissingRanks | None:
        """Return what finds out about ranks that do not come, or None.

        Not a collective.

        Args:
            again_s: Seconds between two searches.
        """
        return None


@cache
def _extensions() -> tuple[ProcessExtension, ...]:
    return tuple(imported(spec.process)() for spec in all_specs() if spec.process)


@contextlib.contextmanager
def joining(rank: int, world_size: int, store: Any) -> Iterator[None]:
    """Call the hooks of a process that joins a process group. Every rank."""
    with contextlib.ExitStack() as contexts:
        for extension in _extensions() if world_size > 1 else ():
            contexts.enter_context(extension.joining(store, rank, world_size))
        yield


def joined(store: Any | None, rank: int, world_size: int) -> None:
    """Call the hooks of a process that is in a process group. Every rank."""
    for extension in _extensions() if store is not None and world_size > 1 else ():
        extension.joined(store, rank, world_size)


def search(store: Any, ranks: Collection[int], again_s: float, limit_s: float) -> MissingRanks:
    """Return what finds out about ranks that do not come: that of an extension, else one that gives them up after a limit."""
    searches = (extension.search(store, ranks, again_s) for extension in _extensions())
    return next(filter(None, searches), None) or MissingRanks(ranks, again_s, limit_s)
