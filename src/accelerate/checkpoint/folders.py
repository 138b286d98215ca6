"""The hidden folders and lock files next to a checkpoint, and the moves of files between folders.

Other processes, killed runs and unpacked archives put names here that this run did not create. None of these names is followed if it is a
symbolic link, and a hidden folder that has a link where a save has a folder is not one of ours.
"""

import contextlib
import errno
import itertools
import logging
import operator
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest
from accelerate.runtime.durable import STAGING_PREFIX, sync_folder

logger = logging.getLogger(__name__)

# In a hidden folder of a save or a removal: the file that holds the name of the checkpoint, by which the folder is known to be one;
# the former checkpoint, until what is the user's own in it is in the new one; and what is worth nothing any more.
PLACE, FORMER, GONE = ".accelerate_save", ".former", ".removed"
_HIDDEN = re.compile(re.escape(STAGING_PREFIX) + "[0-9a-f]{16}")
# No file system has longer names, in bytes.
_LONGEST = 255
# Follows no link, and does not wait for the other end of a pipe.
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """Turn an error into a warning, because the new checkpoint is complete without this step."""
    try:
        yield
    except Exception as error:  # file systems and stores define more errors
        logger.warning("%s: %s", what, error or type(error).__name__)


# -- looking -----------------------------------------------------------------------------------------------------------


def scan(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, by name; nothing if there is no such folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(entries, key=operator.attrgetter("name"))
    return []


def is_folder(path: str) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):  # a name that no file system has
        return False


def leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; not one that cannot be examined, such as a link to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_name(name: str) -> bool:
    """Return whether a text can be the name of an entry of a folder."""
    is_one = name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name
    return is_one and len(os.fsencode(name)) <= _LONGEST


# -- hidden folders of saves and removals ------------------------------------------------------------------------------


def asides(folder: str) -> list[tuple[str, str]]:
    """Return the hidden folders of saves and removals in a folder, each with the name of its checkpoint; no others."""
    found = []
    for entry in scan(folder):
        if entry.name.startswith(STAGING_PREFIX) and is_folder(entry.path):
            name = _name_in(entry.path)
            parts = [os.path.join(entry.path, part) for part in (name, FORMER, GONE)]
            if name and not any(map(os.path.islink, parts)):
                found.append((entry.path, name))
    return found


def _name_in(aside: str) -> str:
    """Return the name of the checkpoint that a hidden folder belongs to; an empty text if it names none."""
    with contextlib.suppress(OSError):
        # Neither a link nor a pipe, which would be waited for, is a file that a save wrote.
        descriptor = os.open(os.path.join(aside, PLACE), os.O_RDONLY | _AS_IT_IS | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                name = os.fsdecode(file.read(_LONGEST + 1))
                return name if is_name(name) and name not in (PLACE, FORMER, GONE) else ""
    return ""


def remove_aside(aside: str) -> None:
    """Remove what a hidden folder no longer needs, and then the folder if it is empty; the file that marks it is removed last."""
    gone = os.path.join(aside, GONE)
    if is_folder(gone):
        with warned(f"{gone} could not be removed"):
            try:
                shutil.rmtree(gone)
            except OSError:
                shutil.rmtree(gone, ignore_errors=True)  # the rest of it
                raise
    with contextlib.suppress(OSError):
        if os.listdir(aside) == [PLACE]:
            os.unlink(os.path.join(aside, PLACE))
        os.rmdir(aside)


def remove_empty_asides(folder: str) -> None:
    """Remove the hidden folders in which a save has not even put its name."""
    for entry in scan(folder):
        if _HIDDEN.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(entry.path)


# -- locks -------------------------------------------------------------------------------------------------------------


def open_lock(path: str) -> int:
    """Open the file of a lock, created if it is missing; OSError with its path for a link or a special file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _AS_IT_IS, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise OSError(errno.EINVAL, "A lock must be a regular file, and this is a link or a device. Remove it", path)


def lock(descriptor: int, path: str) -> bool | None:
    """Lock a file (flock) without waiting; return whether that succeeded, None if the file system has no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except (BlockingIOError, PermissionError, FileNotFoundError):  # the last: the former holder has removed the file
        return False
    except (OSError, ImportError):  # a file system without locks, or Windows
        return None


# -- making and moving -------------------------------------------------------------------------------------------------


def make_folder(path: str) -> None:
    """Create a folder and its parents, and sync them to the disk."""
    if not os.path.isdir(path):
        make_folder(os.path.dirname(path))
        Path(path).mkdir(exist_ok=True)
        sync_folder(os.path.dirname(path))


def parts_of(folder: str) -> list[str]:
    """Return the files that a checkpoint lists, and other entries of the folder with a name of a checkpoint's file; the rest belongs to the user."""
    listed: list[str] = []
    with contextlib.suppress(FileNotFoundError, DamagedCheckpoint):
        listed += Manifest.read(folder).files
    unlisted = {*os.listdir(folder)} - {name.split("/")[0] for name in listed}
    named = [entry for entry in unlisted if manifest.is_checkpoint_file(entry) or manifest.is_shard_file(entry)]
    return [*listed, *named, NAME]


def carry_over(former: str, folder: str, parts: Collection[str]) -> None:
    """Move all but the parts of a checkpoint from the replaced folder to the new one, without overwriting."""
    for entry in scan(former):
        if entry.name in parts:
            continue
        target, merges = os.path.join(folder, entry.name), is_folder(entry.path)
        if os.path.lexists(target) and not (merges and is_folder(target)):
            number = next(number for number in itertools.count(1) if not os.path.lexists(f"{target}.former_{number}"))
            message = "%s was written to while a checkpoint took its folder; what it was before is %s.former_%d."
            logger.warning(message, target, target, number)
            target = f"{target}.former_{number}"
        below = [name.partition("/")[2] for name in parts if name.startswith(f"{entry.name}/")] if merges else []
        if below or is_folder(target):
            carry_over(entry.path, target, below)
        else:
            os.makedirs(folder, exist_ok=True)
            os.rename(entry.path, target)
