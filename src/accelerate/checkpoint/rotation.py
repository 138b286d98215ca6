"""Automatically named checkpoints: which exist, which is the last complete one, and which are removed."""

import logging
import os
import shutil

from accelerate.checkpoint import names

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]


def numbered_checkpoints(folder: Path) -> list[tuple[int, str]]:
    """Return the automatically named checkpoints in a folder as pairs of number and path, oldest first.

    Args:
        folder: Where to look. It need not exist.
    """
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = ((names.number_of(entry), os.path.join(os.fspath(folder), entry)) for entry in entries)
    return sorted((number, path) for number, path in found if number is not None and os.path.isdir(path))


def is_complete(checkpoint: Path) -> bool:
    """Say whether the saving of a checkpoint came to its end.

    Args:
        checkpoint: A checkpoint's folder.
    """
    entries = os.listdir(checkpoint)
    # A run may have been killed between making the folder and marking it.
    return bool(entries) and not any(entry.startswith(names.INCOMPLETE_MARKER) for entry in entries)


def latest_complete(folder: Path) -> str:
    """Return the path of the automatically named checkpoint with the highest number whose saving came to its end.

    Args:
        folder: Where the checkpoints are.

    Raises:
        FileNotFoundError: There is none.
    """
    checkpoints = numbered_checkpoints(folder)
    for _, path in reversed(checkpoints):
        if is_complete(path):
            return path
        logger.warning("%s is passed over: its saving did not come to its end.", path)
    raise FileNotFoundError(
        f"There is no complete checkpoint in {os.fspath(folder)!r} ({len(checkpoints)} incomplete). Save one first, or "
        "name the folder: load_state(input_dir)."
    )


def prune(folder: Path, limit: int | None, keep: Path) -> list[str]:
    """Remove the oldest checkpoints beyond a limit, once the newest one is complete. One rank per file system calls it.

    Args:
        folder: Where the checkpoints are.
        limit: How many complete ones stay; None keeps all.
        keep: The checkpoint just written; it always stays.

    Returns:
        The paths removed.
    """
    if limit is None:
        return []
    others = [path for _, path in numbered_checkpoints(folder) if not _same(path, keep)]
    complete = [path for path in others if is_complete(path)]
    surplus = len(complete) + 1 - max(limit, 1)
    # What a killed run left behind is of no use to anybody, and never counts towards the limit.
    unfinished = [path for path in others if not is_complete(path)]
    removed = [*complete[: max(surplus, 0)], *unfinished]
    for path in removed:
        logger.info("Removing the checkpoint %s (total_limit=%d).", path, limit)
        _remove(path)
    return removed


def _same(left: Path, right: Path) -> bool:
    return os.path.abspath(left) == os.path.abspath(right)


def _remove(path: str) -> None:
    folder, name = os.path.split(path)
    renamed = os.path.join(folder, names.REMOVED_PREFIX + name)
    shutil.rmtree(renamed, ignore_errors=True)  # of a run that was killed while it removed one of this number
    try:
        os.rename(path, renamed)
    except OSError as error:
        logger.warning("The checkpoint %s could not be removed: %s", path, error)
        return
    shutil.rmtree(renamed, ignore_errors=True)
