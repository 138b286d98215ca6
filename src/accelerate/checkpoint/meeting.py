"""The end of a save: every rank learns that the whole checkpoint is written, or what went wrong.

A barrier would do, but many training scripts call ``save_state`` on the main process alone, and the other ranks go on
training: a collective would then meet a different one and hang. So ranks leave notes in the process group's key-value
store. A rank that nobody joins goes on after a short wait, with a warning.

Source:
    https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import collections
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

# How long a rank waits for the others to begin to save. Ranks that train together reach a save within a step of each
# other, so who is not there by then is not coming.
PATIENCE = timedelta(seconds=10)

# How long a rank waits for those that are saving; writing takes as long as it takes.
LIMIT = timedelta(hours=4)

_calls: collections.Counter[str] = collections.Counter()
_alone = False


def default_store() -> Any | None:
    """Return the key-value store of the process group, or None when there is no group of several processes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store()


class Meeting:
    """One save of a checkpoint by the ranks that call it.

    Each rank makes one, writes its files, and calls ``end``.

    Args:
        folder: The checkpoint's folder; ranks meet by its name.
        rank: This process's rank. Rank 0 presides.
        world_size: Number of ranks.
        store: Where notes are left; None for a single process.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, world_size: int, store: Any | None) -> None:
        name = os.path.basename(os.path.normpath(os.fspath(folder)))
        self.rank = rank
        self.others = [other for other in range(world_size) if other != rank]
        self.store = store
        self.prefix = f"accelerate/save/{name}/{_calls[name]}"
        _calls[name] += 1
        if store is not None:
            store.set(self._key("begun", rank), "")

    def end(self, problem: BaseException | None, publish: Callable[[], None]) -> None:
        """Wait for the other ranks, and publish the checkpoint when all of them are done.

        Args:
            problem: What went wrong on this rank.
            publish: Called once everything is written, and not at all if something failed.

        Raises:
            RuntimeError: Another rank failed to save; the message says which and why.
        """
        if self.store is None:
            if problem is None:
                publish()
        else:
            note = f"{type(problem).__name__}: {problem}" if problem is not None else ""
            self.store.set(self._key("done", self.rank), note)
            failed = self._preside(note, publish) if self.rank == 0 else self._attend(publish)
            if failed and problem is None:
                raise RuntimeError(f"The checkpoint is incomplete, because saving failed on other ranks. {failed}")
        if problem is not None:
            raise problem

    def _preside(self, note: str, publish: Callable[[], None]) -> str:
        failed = [f"Rank 0: {note}"] if note else []
        for rank in self._present(self.others):
            self.store.wait([self._key("done", rank)], LIMIT)
            if theirs := self.store.get(self._key("done", rank)).decode():
                failed.append(f"Rank {rank}: {theirs}")
        if not failed:
            publish()
        self.store.set(self._key("ended"), " ".join(failed))
        return " ".join(failed)

    def _attend(self, publish: Callable[[], None]) -> str:
        if not self._present([0]):
            return ""
        self.store.wait([self._key("ended")], LIMIT)
        failed = self.store.get(self._key("ended")).decode()
        if not failed:
            publish()
        return failed

    def _present(self, ranks: list[int]) -> list[int]:
        """Return which of some ranks save as well, after giving them time to begin."""
        global _alone
        keys = {rank: self._key("begun", rank) for rank in ranks}
        deadline = time.monotonic() + (0 if _alone else PATIENCE.total_seconds())
        while not self.store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.005)
        present = [rank for rank, key in keys.items() if self.store.check([key])]
        if len(present) < len(ranks) and not _alone:
            _alone = True  # a script that does this once does it at every save; wait and warn once
            logger.warning(
                "save_state was called by rank %d, but not by rank %s. The checkpoint lacks their random states, and "
                "the ranks do not wait for each other. Call save_state on every rank: only one of them writes each file.",
                self.rank,
                ", ".join(str(rank) for rank in ranks if rank not in present),
            )
        return present

    def _key(self, *parts: Any) -> str:
        return "/".join([self.prefix, *map(str, parts)])
