"""Which checkpoints of a run there are, which is the newest whole one, and which go when a new one has come."""

import logging
from collections.abc import Iterable

from accelerate.checkpoint.storage import CheckpointStorage

logger = logging.getLogger(__name__)


def newest_first(folder: CheckpointStorage) -> tuple[list[CheckpointStorage], list[str]]:
    """Return the checkpoints in a folder that may be loaded, newest first, and what was passed over. Any rank, alone.

    Args:
        folder: Where numbered checkpoints are, or a checkpoint itself.

    Returns:
        Places, and a line for each checkpoint that is not complete.
    """
    found, passed = [], []
    for _, place in reversed(folder.checkpoints()):
        state = place.state()
        if state.loads:
            found.append(place)
        elif state.kind != "absent":
            passed.append(f"{place.location}: {state.reason}")
    if not found and not passed:
        state = folder.state()
        if state.kind == "complete":
            found.append(folder)
        elif state.kind == "incomplete" and folder.files():
            passed.append(f"{folder.location}: {state.reason}")
    return found, passed


def prune(folder: CheckpointStorage, limit: int | None, keep: Iterable[str | None]) -> list[str]:
    """Remove the oldest checkpoints beyond a limit, once the newest one is in its place. One rank per file system calls it.

    Only complete ones count and go, and what killed saves left; a checkpoint that is damaged stays for somebody to look at.

    Args:
        folder: Where the checkpoints are.
        limit: How many complete ones stay, at least one; None keeps all.
        keep: Locations of checkpoints that stay whatever their number: the one just written, and the one the run began from.

    Returns:
        The locations removed.
    """
    kept = {location for location in keep if location}
    removed = list(folder.sweep())
    if limit is None:
        return removed
    # What a link leads to is not ours to remove.
    whole = [place for _, place in folder.checkpoints() if place.parent() == folder and place.state().loads]
    surplus = len(whole) - max(limit, 1)
    for place in whole:
        if surplus <= 0:
            break
        if place.location in kept:
            continue
        surplus -= 1
        logger.info("Removing the checkpoint %s (total_limit=%d).", place.location, limit)
        try:
            place.remove()
        except OSError as error:  # the new checkpoint is whole all the same
            logger.warning("The checkpoint %s could not be removed: %s", place.location, error)
            continue
        removed.append(place.location)
    return removed
