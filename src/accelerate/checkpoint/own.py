"""What lies in a checkpoint's folder beside the checkpoint is the user's own, and outlives it."""

import contextlib
import logging
import os
import shutil

from accelerate.checkpoint import names
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest
from accelerate.runtime.durable import sync_folder

logger = logging.getLogger(__name__)


def users_own(folder: str) -> list[str]:
    """Return what lies in a checkpoint's folder and is no part of the checkpoint.

    Args:
        folder: a folder that is about to be replaced.

    Returns:
        Paths relative to it, of files, and of folders with nothing but the user's own in them.
    """
    parts = {NAME, names.PUBLISHING_MARKER, names.LOCK_PREFIX}
    try:
        parts |= set(Manifest.read(folder).files)
    except (FileNotFoundError, NotADirectoryError, DamagedCheckpoint):
        pass
    inner = {name[:index] for name in parts for index, sign in enumerate(name) if sign == "/"}

    def look(below: str) -> list[str]:
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.listdir(os.path.join(folder, below)):
                name = f"{below}/{entry}" if below else entry
                if name in inner:
                    found += look(name)
                elif (
                    below
                    and name not in parts
                    or not (name in parts or names.is_checkpoint_file(name) or names.is_shard_file(name))
                ):
                    found.append(name)
        return found

    return look("")


def carry(source: str, target: str) -> None:
    """Move what is the user's own; what has come into its place meanwhile stays, too.

    Args:
        source: a file or a folder.
        target: where it goes.
    """
    if not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)
        return
    if os.path.isdir(source) and os.path.isdir(target) and not os.path.islink(source) and not os.path.islink(target):
        for entry in os.listdir(source):
            carry(os.path.join(source, entry), os.path.join(target, entry))
        return
    number = next(number for number in range(1, 1 << 30) if not os.path.lexists(f"{target}.former_{number}"))
    os.rename(source, f"{target}.former_{number}")
    logger.warning(
        "%s was written to while a checkpoint took its folder; what it was before is %s.former_%d.",
        *[target] * 2,
        number,
    )


def clear_away(folder: str, entry: str, own: frozenset[str]) -> None:
    """Remove a file or a folder of a checkpoint, but for what is the user's own in it.

    Args:
        folder: the checkpoint's.
        entry: path in it.
        own: from `users_own`.
    """
    path = os.path.join(folder, *entry.split("/"))
    if os.path.isdir(path) and not os.path.islink(path):
        if any(name.startswith(f"{entry}/") for name in own):
            for name in os.listdir(path):
                if f"{entry}/{name}" not in own:
                    clear_away(folder, f"{entry}/{name}", own)
        else:
            shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def make_folders(path: str) -> list[str]:
    """Make a folder and those above it; return which were not there, the innermost first.

    Args:
        path: the folder.
    """
    missing = []
    while path and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
    return missing


def duplicate(source: str, target: str) -> None:
    """Give a file or a folder that is on the disk a second name, or make a copy that is on the disk where one cannot.

    Args:
        source: what there is.
        target: its second name.
    """
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
        for entry in os.listdir(source):
            duplicate(os.path.join(source, entry), os.path.join(target, entry))
        sync_folder(target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
