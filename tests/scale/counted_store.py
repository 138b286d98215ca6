"""An object store for tests: fsspec's `counted://`, in a folder that all processes see, which counts requests and bytes of each process."""

import contextlib
import os
from collections import Counter
from typing import Any

from fsspec import AbstractFileSystem, register_implementation
from fsspec.spec import AbstractBufferedFile

# Requests by kind, and the bytes "read" and "written", of this process.
counts: Counter[str] = Counter()


class CountedFileSystem(AbstractFileSystem):
    """Objects below the folder in COUNTED_STORE. As in a real store there is no folder without objects, and an object is there whole."""

    protocol = "counted"

    def _path(self, path: str) -> str:
        return os.path.join(os.environ["COUNTED_STORE"], self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what lies directly below a path."""
        counts["list"] += 1
        path = self._strip_protocol(path)
        names = [path]
        with contextlib.suppress(NotADirectoryError):
            names = [f"{path}/{name}" for name in os.listdir(self._path(path)) if not name.endswith(".part")]
        found = []
        for name in names:
            kind = "directory" if os.path.isdir(self._path(name)) else "file"
            found.append({"name": name, "type": kind, "size": os.path.getsize(self._path(name))})
        return found if detail else names

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes of an object, or a range of them."""
        with open(self._path(path), "rb") as file:
            file.seek(start or 0)
            data = file.read() if end is None else file.read(end - (start or 0))
        counts.update(get=1, read=len(data))
        return data

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        counts["remove"] += 1
        path = self._path(path)
        os.unlink(path)
        with contextlib.suppress(OSError):  # a folder that is not empty
            while (path := os.path.dirname(path)) != os.environ["COUNTED_STORE"]:
                os.rmdir(path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "CountedFile":
        return CountedFile(self, path, mode, **options)


class CountedFile(AbstractBufferedFile):
    """An object that is read by ranges, and written in parts."""

    DEFAULT_BLOCK_SIZE = 5 << 20

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)

    def _upload_chunk(self, final: bool = False) -> None:
        data, path = self.buffer.getvalue(), self.fs._path(self.path)
        counts.update(put=1, written=len(data))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.part", "ab") as file:
            file.write(data)
        if final:
            os.replace(f"{path}.part", path)


register_implementation("counted", CountedFileSystem, clobber=True)
