"""Objects below a URL, by fsspec: fresh answers, some patience, and errors that name the object.

Transient errors are met with a few repetitions; the libraries behind fsspec repeat requests by themselves, too.
"""

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from threading import BoundedSemaphore
from typing import Any, TypeVar

from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.storage import Stored

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Enough to keep a network busy; the libraries send the parts of a large file concurrently by themselves.
THREADS = 4
# Files of this size are sent in parts of 50 MB, several at a time, all of them in memory: two such files at once are enough.
LARGE = 100 << 20
LARGE_AT_ONCE = 2
TRIES = 3
PAUSE_S = 0.5
# A small request that took so long was repeated by the library already.
PATIENCE_S = 5.0

_PERMANENT = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    TypeError,
    NotImplementedError,
    ImportError,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Bucket:
    """The objects below one URL.

    Args:
        location: the URL, without a slash at its end unless it is a root.

    Raises:
        ImportError: fsspec, or the package that it needs for this kind of URL, is not installed.
        ValueError: fsspec knows no such kind of URL.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._system()

    def _system(self) -> tuple[Any, str]:
        """Return the file system and the path in it.

        fsspec keeps the instances: one per process where threads may share it, else one per thread. A fork gets its own.
        """
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(
                f'{self.location!r} needs fsspec: pip install "accelerate[object-stores]", and the package of the store, '
                "such as s3fs or gcsfs."
            ) from error
        try:
            return url_to_fs(self.location)
        except ImportError as error:
            raise ImportError(f"{self.location!r} needs another package: {error}") from error
        except ValueError as error:
            raise ValueError(f"fsspec cannot use the URL {self.location!r}: {error}") from error

    def url(self, name: str) -> str:
        """Return the URL of an object.

        Args:
            name: its path below the location.
        """
        return f"{self.location}{name}" if self.location.endswith("/") else f"{self.location}/{name}"

    def _path(self, root: str, name: str) -> str:
        return f"{root.rstrip('/')}/{name.rstrip('/')}" if name else root

    # -- looking ---------------------------------------------------------------------------------------------------

    def entries(self, folder: str = "") -> dict[str, Stored | None]:
        """Return what lies directly in a folder: names of objects, and names of folders with None.

        Args:
            folder: its path below the location; the location itself by default.

        Raises:
            NotADirectoryError: the location itself is an object.
            OSError: the store refuses, or does not answer.
        """
        system, root = self._system()
        base = self._path(root, folder)
        try:
            told = self._fresh(folder, lambda: system.ls(base, detail=True))
        except FileNotFoundError:
            return {}
        found: dict[str, Stored | None] = {}
        for info in told:
            path = system._strip_protocol(info["name"])
            if path == base and info["type"] != "directory":
                # Some consoles make an empty object to show a folder.
                if info["name"].endswith("/") or len(told) > 1:
                    continue
                raise NotADirectoryError(f"{self.location!r} is an object, so no checkpoint can be there.")
            name = _below(path, base)
            if name and "/" not in name:
                found[name] = None if info["type"] == "directory" else _stored(info)
        return found

    def below(self, folder: str = "") -> dict[str, Stored]:
        """Return all objects below a folder, by their path relative to it.

        Args:
            folder: its path below the location; the location itself by default.
        """
        system, root = self._system()
        base = self._path(root, folder)
        try:
            told = self._fresh(folder, lambda: system.find(base, detail=True))
        except FileNotFoundError:
            return {}
        found = {}
        for path, info in told.items():
            name = _below(system._strip_protocol(path), base)
            if name and not path.endswith("/") and info.get("type") == "file":
                found[name] = _stored(info)
        return found

    def _fresh(self, name: str, call: Callable[[], T]) -> T:
        """Ask without the listings that the file system remembers."""

        def ask() -> T:
            self._system()[0].invalidate_cache()
            return call()

        return _persistently(ask, f"{self.url(name) if name else self.location} could not be listed")

    # -- reading and writing ---------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object, or None if there is none.

        Args:
            name: its path below the location.
        """
        system, root = self._system()
        try:
            return _persistently(
                lambda: system.cat_file(self._path(root, name)), f"{self.url(name)} could not be read"
            )
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small object at once: it is there in full, or as it was before.

        Args:
            name: its path below the location.
            data: its content.
        """
        system, root = self._system()
        path = self._path(root, name)
        _persistently(lambda: system.pipe_file(path, data), f"{self.url(name)} could not be written")

    def put(self, path: str, name: str) -> None:
        """Upload a file.

        Args:
            path: of the local file.
            name: path of the object below the location.
        """
        system, root = self._system()
        target = self._path(root, name)
        _persistently(lambda: system.put_file(path, target), f"{self.url(name)} could not be uploaded", math.inf)

    def get(self, name: str, path: str, size: int) -> None:
        """Download an object; the file is there in full, or not at all.

        Args:
            name: path of the object below the location.
            path: of the local file; its folder exists.
            size: what it must have.

        Raises:
            DamagedCheckpoint: there is no such object, or it has another size.
        """
        system, root = self._system()
        source, partial = self._path(root, name), f"{path}.part"

        def get() -> None:
            system.get_file(source, partial)
            if (got := os.path.getsize(partial)) != size:
                system.invalidate_cache()
                if system.info(source)["size"] == got:
                    raise DamagedCheckpoint(f"{name} has {got} bytes, but {size} were written")
                raise OSError(f"{got} bytes came, but {size} were written")

        try:
            _persistently(get, f"{self.url(name)} could not be downloaded", math.inf)
            os.replace(partial, path)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing ({size} bytes were written)") from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(partial)

    # -- removing --------------------------------------------------------------------------------------------------

    def remove(self, chosen: list[str]) -> None:
        """Remove objects; those that are gone already are no matter.

        Args:
            chosen: their paths below the location.
        """
        system, root = self._system()
        paths = [self._path(root, name) for name in chosen]
        # What looks like a pattern is taken for one when objects are removed together.
        patterns = [path for path in paths if any(sign in path for sign in "*?[")]
        together = [path for path in paths if path not in set(patterns)]

        def remove_together() -> None:
            try:
                system.rm(together)
            except FileNotFoundError:
                remove_each(together)

        def remove_each(each: list[str]) -> None:
            for path in each:
                with contextlib.suppress(FileNotFoundError):
                    system.rm_file(path)

        if together:
            _persistently(remove_together, f"{self.location}: {len(together)} objects could not be removed")
        if patterns:
            _persistently(
                lambda: remove_each(patterns), f"{self.location}: {len(patterns)} objects could not be removed"
            )

    def remove_folder(self, folder: str = "") -> None:
        """Remove all objects below a folder, and the folder where it is one by itself; but never a bucket.

        Args:
            folder: its path below the location; the location itself by default.
        """
        system, root = self._system()
        path = self._path(root, folder)
        self.remove([f"{folder}/{name}" if folder else name for name in self.below(folder)])
        is_bucket = not system.root_marker and "/" not in path
        if is_bucket or path in ("", "/") or any(sign in path for sign in "*?["):
            return

        def remove() -> None:
            system.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if system.isdir(path):
                    system.rm(path, recursive=True)

        _persistently(remove, f"{self.url(folder)} could not be removed")


def _below(path: str, root: str) -> str:
    start = root.rstrip("/") + "/"
    return path[len(start) :] if path.startswith(start) else ""


def _stored(info: Mapping[str, Any]) -> Stored:
    return Stored(int(info["size"] or 0), _modified(info))


def _modified(info: Mapping[str, Any]) -> float | None:
    """The time of an object, which each file system gives in its own way."""
    for key in ("LastModified", "mtime", "last_modified", "modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _persistently(task: Callable[[], T], failure: str, patience: float = PATIENCE_S) -> T:
    begun = time.monotonic()
    for attempt in range(1, TRIES + 1):
        try:
            return task()
        except DamagedCheckpoint:
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{failure}: {error}") from error
        except PermissionError as error:
            raise PermissionError(f"{failure}: {error}. Check the credentials and their rights.") from error
        except Exception as error:
            hopeless = isinstance(error, _PERMANENT) or getattr(error, "errno", None) in _FULL
            if hopeless or attempt == TRIES or time.monotonic() - begun > patience:
                raise OSError(f"{failure}: {type(error).__name__}: {error}") from error
            pause = PAUSE_S * 2 ** (attempt - 1)
            logger.warning("%s: %s. Trying again in %.1f s.", failure, error, pause)
            time.sleep(pause)
    raise AssertionError("the last attempt raises")


def concurrently(task: Callable[[str], None], sizes: Mapping[str, int]) -> None:
    """Move files in a few threads, the largest first; the first error stops what has not begun.

    Args:
        task: called with each name, once.
        sizes: of the files, by name.
    """
    large = BoundedSemaphore(LARGE_AT_ONCE)

    def one(name: str) -> None:
        with large if sizes[name] > LARGE else contextlib.nullcontext():
            task(name)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="accelerate-store") as pool:
        futures = [pool.submit(one, name) for name in sorted(sizes, key=sizes.__getitem__, reverse=True)]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
