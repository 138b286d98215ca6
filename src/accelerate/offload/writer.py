"""Writing weights into an offload folder: all of them appear at once, or none does."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash

from accelerate.runtime.durable import STAGING_PREFIX

INDEX_NAME = "index.json"
Folder = str | os.PathLike


def tensor_bytes(weight: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes, row-major, in the machine's byte order.

    Args:
        weight: A tensor of any dtype and device but meta.
    """
    # reshape before view: a scalar has no last dimension to reinterpret.
    return memoryview(weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())


def checksum(data: memoryview | bytes) -> str:
    """Return the checksum that an index keeps for the bytes of a weight: XXH3, 64 bits, in hexadecimal.

    Source:
        https://xxhash.com
    """
    return xxhash.xxh3_64_hexdigest(data)


def read_index(folder: Folder) -> dict[str, dict[str, Any]]:
    """Return the index of an offload folder; an empty one where there is none.

    Args:
        folder: The folder.

    Raises:
        ValueError: The file is there and is no index.
    """
    path = Path(folder) / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is no index of offloaded weights ({error}). Delete the folder and offload again."
        ) from error
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise ValueError(f"{path} is no index of offloaded weights: it must map names to entries.")
    return index


def weight_path(folder: Folder, name: str) -> str:
    """Return the file of a weight in an offload folder, which is never outside of it.

    Args:
        folder: The folder.
        name: The weight's name.

    Raises:
        ValueError: The name cannot be that of a file.
    """
    file = f"{name}.dat"
    if os.path.basename(file) != file or "\0" in file:
        raise ValueError(
            f"The weight {name!r} cannot be a file in {os.fspath(folder)}, because of a character in its name. Rename the module, "
            "or leave it on the CPU; checkpoints in safetensors are read in place, whatever their names are."
        )
    return os.path.join(folder, file)


# Counts publications of this process, so that a loader that has files mapped knows when to look whether they were replaced.
class _Publications:
    count = 0


publications = _Publications()


class OffloadWriter:
    """Writes weights aside in a folder; leaving the ``with`` block publishes them together with their index.

    If the block raises, or a disk is full, what was written is removed, and the folder too if it was made here. A process that has
    mapped a file that is replaced goes on reading the former one.

    Args:
        folder: The offload folder.

    Attributes:
        index: Entries of what was added: ``{"dtype", "shape", "xxh3"}`` of files, or what `refer` was given.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with OffloadWriter(folder) as writer:
        ...         writer.add("weight", torch.ones(2))
        ...     sorted(os.listdir(folder))
        ['index.json', 'weight.dat']
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = Path(folder)
        self.index: dict[str, dict[str, Any]] = {}
        self._aside: Path | None = None
        self._made: list[Path] = []  # folders, the innermost first

    def __enter__(self) -> "OffloadWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.index:
                self._write_index({**read_index(self.folder), **self.index})
                self._publish()
        finally:
            self._clean()

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Write a weight aside.

        Args:
            name: Its name, which gives the file ``<name>.dat``.
            weight: The tensor, of any dtype.

        Raises:
            OSError: The disk is full, or the folder cannot be written; the message names the folder and the bytes needed.
            ValueError: The tensor is on the meta device, or its name cannot be that of a file.
        """
        if weight.device.type == "meta":
            raise ValueError(f"The weight {name!r} is on the meta device and has no data to offload.")
        path = weight_path(self.folder, name)
        data = tensor_bytes(weight)
        self._write(os.path.basename(path), data)
        self.index[name] = {
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(weight.shape),
            "xxh3": checksum(data),
        }

    def refer(self, name: str, entry: dict[str, Any]) -> None:
        """Note a weight that stays in a file of its own.

        Args:
            name: Its name.
            entry: Its entry in the index, with ``safetensors_file``, ``weight_name``, ``dtype`` and ``shape``.
        """
        self.index[name] = entry

    @contextlib.contextmanager
    def without_index(self) -> Iterator[None]:
        """A ``with`` block like the writer's own, whose end adds nothing to the folder's index; entries of files that are replaced
        are brought up to date, because they hold checksums."""
        try:
            yield
            known = read_index(self.folder)
            replaced = {name: entry for name, entry in self.index.items() if known.get(name, entry) != entry}
            if replaced:
                self._write_index({**known, **replaced})
            self._publish()
        finally:
            self._clean()

    def _write_index(self, index: dict[str, dict[str, Any]]) -> None:
        self._write(INDEX_NAME, json.dumps(index, indent=2).encode("utf-8"))

    def _write(self, file: str, data: memoryview | bytes) -> None:
        with self._named(file, len(data)):
            if self._aside is None:
                self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
                self.folder.mkdir(parents=True, exist_ok=True)
                # Several processes may write to one folder.
                self._aside = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.folder))
            if (self.folder / file).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            (self._aside / file).write_bytes(data)

    def _publish(self) -> None:
        """Give every file its name, the index last."""
        new = []
        try:
            for aside in sorted(self._aside.iterdir(), key=lambda path: path.name == INDEX_NAME):
                path = self.folder / aside.name
                there = os.path.lexists(path)
                with self._named(path.name, aside.stat().st_size):
                    os.replace(aside, path)
                if not there:
                    new.append(path)
        except BaseException:
            for path in new:
                os.unlink(path)
            raise
        self._made = []
        publications.count += 1

    def _clean(self) -> None:
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process has written there
            for path in self._made:
                path.rmdir()

    @contextlib.contextmanager
    def _named(self, file: str, nbytes: int) -> Iterator[None]:
        """Have errors say what was to be written, where to, and what to do."""
        try:
            yield
        except OSError as error:
            free = ""
            with contextlib.suppress(OSError):
                free = f"{shutil.disk_usage(self.folder).free:,} bytes are free there. "
            raise type(error)(
                error.errno or errno.EIO,
                f"Offloading {file} ({nbytes:,} bytes) to {self.folder} failed: {error.strerror or error}. "
                f"{free}Nothing of it was kept; use a folder that can be written, on a larger disk",
            ) from error


def write_index(index: Mapping[str, dict[str, Any]], folder: Folder) -> None:
    """Merge entries into a folder's index in one step; new ones replace old ones of the same name.

    Args:
        index: Names to entries.
        folder: The folder, made if it does not exist.
    """
    with OffloadWriter(folder) as writer:
        for name, entry in index.items():
            writer.refer(name, entry)
