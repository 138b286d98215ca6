"""Weights read where they are: files mapped into memory, and tensors that are views of the mapping.

A view costs no memory of its own. The kernel reads a page when it is first used, keeps it while there is room, and drops it
when there is none, because the file still has it. Nothing has to be copied to be offloaded.
"""

import ctypes
import functools
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

Path_ = str | os.PathLike

# Seconds between two looks at a file that is in use: a look takes a microsecond on a local disk, and much longer on others.
CHECK_EVERY = 1.0

# Of madvise(2). The first maps pages without reading them in this thread; kernels before 5.14 do not know the second.
_WILL_NEED, _POPULATE_READ = 3, 22

# This many pages of a tensor are looked at to tell whether it is in memory.
_SAMPLES = 16

_FOREIGN_FORMATS = ("tf", "flax", "np", "mlx")


class WeightFile:
    """A file of weights, opened once; what it is read for stays valid while the file is replaced, but not when it is rewritten.

    Args:
        path: The file.

    Attributes:
        path: The file's path as text.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read: truncated, or not what its name says.
    """

    def __init__(self, path: Path_) -> None:
        self.path = os.path.abspath(path)  # wherever the process goes later
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"The file of weights {self.path} does not exist.")
        self._stamp = self._look()
        self._next_look = time.monotonic() + CHECK_EVERY

    def keys(self) -> list[str]:
        """The names of the tensors in the file."""
        raise NotImplementedError

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor as a view of the file; writing to it does not change the file.

        Raises:
            KeyError: The file has no tensor of that name; the message names the file.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of every tensor by name."""
        tensors = ((key, self.tensor(key)) for key in self.keys())
        return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors}

    def close(self) -> None:
        """Let go of memory that the file's tensors take, if they are not mapped; they are read again when they are asked for."""

    def check(self) -> None:
        """Raise if the file was changed in place since it was opened, because then so were the tensors read from it.

        A file that was replaced or deleted is fine: the mapping is of the old one. Looks at most once in `CHECK_EVERY`.

        Raises:
            RuntimeError: It was changed.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        found = self._look()
        if found is not None and found[0] == self._stamp[0] and found != self._stamp:
            raise RuntimeError(
                f"The file {self.path} was changed while weights in it are in use, so these weights are lost. Load the model "
                "again; write new checkpoints to another folder, or replace the file in one step (os.replace)."
            )
        self._next_look = now + CHECK_EVERY

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


class SafetensorsFile(WeightFile):
    """A file in the format of safetensors.

    Raises:
        OSError: Its metadata names a format that nobody knows.
    """

    def __init__(self, path: Path_) -> None:
        super().__init__(path)
        try:
            self._handle = safe_open(self.path, framework="pt")
        except SafetensorError as error:
            size = os.path.getsize(self.path)
            raise ValueError(
                f"{self.path} ({size:,} bytes) is truncated or no safetensors file: {error}. Copy or download it again."
            ) from error
        check_format(self.path, self._handle.metadata())
        self._keys = list(self._handle.keys())
        self._known = frozenset(self._keys)

    def keys(self) -> list[str]:
        """The names of the tensors in the file."""
        return self._keys

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor as a view of the file."""
        if key not in self._known:
            raise KeyError(f"{self.path} has no tensor {key!r}; it has {_some(self._keys)}.")
        return self._handle.get_tensor(key)


class TorchFile(WeightFile):
    """A file that `torch.save` wrote, of which only tensors in plain containers are accepted, so that no code in it runs."""

    def __init__(self, path: Path_) -> None:
        super().__init__(path)
        self._tensors: dict[str, Any] | None = None
        self._mapped = True
        self._keys = list(self._load())

    def keys(self) -> list[str]:
        """The names of the tensors in the file."""
        return self._keys

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor, as a view of the file if that can be mapped."""
        tensors = self._load()
        if key not in tensors:
            raise KeyError(f"{self.path} has no tensor {key!r}; it has {_some(self._keys)}.")
        return tensors[key]

    def describe(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of every tensor by name; what is no tensor is left out."""
        tensors = self._load()
        # Modules may keep extra state in other forms, which only their own `load_state_dict` understands.
        found = {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
        if tensors and not found:
            raise ValueError(
                f"{self.path} is no state dict: {_some(list(tensors))} are no tensors. Save model.state_dict() alone."
            )
        described = {key: (tensor.shape, tensor.dtype) for key, tensor in found.items()}
        self.close()
        return described

    def close(self) -> None:
        """Let go of tensors that are not mapped."""
        if not self._mapped:
            self._tensors = None

    def _load(self) -> dict[str, Any]:
        if self._tensors is None:
            try:
                self._tensors, self._mapped = _load_torch(self.path)
            except (RuntimeError, EOFError, OSError, ValueError) as error:
                size = os.path.getsize(self.path)
                raise ValueError(
                    f"{self.path} ({size:,} bytes) is truncated or no state dict of torch.save: "
                    f"{str(error).partition(chr(10))[0]}. Copy or download it again."
                ) from error
        return self._tensors


def open_weights(path: Path_) -> WeightFile:
    """Open a file of weights by its extension: safetensors, else what `torch.save` wrote.

    Args:
        path: The file.
    """
    return (SafetensorsFile if os.fspath(path).endswith(".safetensors") else TorchFile)(path)


def check_format(path: str, metadata: Mapping[str, str] | None) -> None:
    """Refuse a safetensors file that was written for another framework.

    Args:
        path: The file, for the message.
        metadata: What its header says; without a format it is taken for torch's.

    Raises:
        OSError: The format is unknown.
        ValueError: It is that of another framework.
    """
    written_for = (metadata or {}).get("format", "pt")
    if written_for in _FOREIGN_FORMATS:
        raise ValueError(f"{path} was written for {written_for!r}; a model of PyTorch needs a file of format 'pt'.")
    if written_for != "pt":
        raise OSError(
            f"The metadata of {path} names the format {written_for!r}, which is unknown. Save it with "
            "save_file(..., metadata={'format': 'pt'})."
        )


def _load_torch(path: str) -> tuple[dict[str, Any], bool]:
    """The content of a file of `torch.save`, and whether its tensors are mapped."""
    mapped = True
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        if "mmap can only be used" not in str(error):
            raise
        loaded, mapped = torch.load(path, map_location="cpu", weights_only=True), False
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds a {type(loaded).__name__}")
    return dict(loaded), mapped


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"


def _strided_read(tensor: torch.Tensor) -> None:
    # One byte of each page is enough to have it read.
    tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()


@functools.cache
def _madvise() -> Callable[[torch.Tensor], None] | None:
    """A function that has the kernel map a tensor's pages, or None where the kernel cannot."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)

    def advise(tensor: torch.Tensor) -> None:
        begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - begin)
        # ctypes lets other threads run meanwhile; mmap.madvise does not.
        if library.madvise(ctypes.c_void_p(begin), length, _POPULATE_READ):
            library.madvise(ctypes.c_void_p(begin), length, _WILL_NEED)

    return advise


def is_resident(tensor: torch.Tensor) -> bool:
    """Say whether a mapped tensor seems to be in memory, from a few of its pages; True where the kernel does not tell.

    Args:
        tensor: A contiguous CPU tensor of any dtype.
    """
    look = _mincore()
    if look is None or tensor.nbytes == 0:
        return True
    first = tensor.data_ptr() // mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes - 1) // mmap.PAGESIZE
    step = max(1, (last - first) // _SAMPLES)
    return all(look(page * mmap.PAGESIZE) for page in range(first, last + 1, step))


@functools.cache
def _mincore() -> Callable[[int], bool] | None:
    """A function that says whether the page at an address is in memory, or None where nobody can."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)

    def look(address: int) -> bool:
        state = ctypes.c_ubyte(1)
        failed = library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(state))
        return bool(failed) or bool(state.value & 1)

    return look


def read_pages(tensor: torch.Tensor) -> None:
    """Have the pages of a mapped tensor read and mapped, so that a computation that follows does not wait for the disk.

    Args:
        tensor: A contiguous CPU tensor of any dtype; for one that is not mapped nothing happens but a look at its pages.
    """
    if tensor.nbytes == 0:
        return
    advise = _madvise()
    if advise is None:
        _strided_read(tensor)
    else:
        advise(tensor)
