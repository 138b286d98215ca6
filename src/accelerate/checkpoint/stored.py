"""Stored states before their tensors are read: which tensors there are, and a plan that reads them into memory.

A `Reader` gives a stored state with a `StoredTensor` in the place of each tensor. ``reader.plan([(stored, target), ...])()`` reads
tensors into targets: plain tensors, or this rank's shards of a DTensor or ShardedTensor. There are two readers: `FullFiles` here, for files of
full tensors, and `dcp.ShardedFolder`. Engines' layouts return a `FullFiles` of tensors that they join.

Tensors in files are read with preadv and are not mapped: a process dies of a mapped page whose file was truncated. An open file stays the
same when another save replaces it.
"""

import contextlib
import errno
import io
import json
import math
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

import torch

from accelerate.checkpoint import formats, torch_files
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.state import is_dtensor, is_sharded_tensor, mapped_leaves
from accelerate.devices.memory import should_reduce_batch_size
from accelerate.modules.unwrap import same_tensors, shared_tensor_names
from accelerate.runtime import durable, torch_private

# Threads share the work of reading from this many bytes on.
_SHARED = 16 << 20
# Torch's reader moves to and fro in a file for each tensor. A file of fewer bytes is quicker in memory.
_SMALL = 4 << 20


@dataclass(eq=False)
class StoredTensor:
    """A tensor of a stored state that has not been read."""

    shape: torch.Size
    dtype: torch.dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredTensor":
        return self  # a copy of an open file would close it a second time


Pairs = Iterable[tuple[StoredTensor, torch.Tensor]]
# Reads tensors into memory, from files that are open and verified; OSError or DamagedCheckpoint.
Plan = Callable[[], Any]


class Reader(ABC):
    """A stored state. No method is a collective.

    Attributes:
        origin: Its file or folder, for messages.
        state: The state, nested, with a `StoredTensor` in the place of each tensor.
        aliases: Names of tensors that are stored under another name, to that name.
        holds_files: The files of a plan stay open, so that it may be read after other saves.
    """

    origin: str
    state: Any
    aliases: Mapping[str, str]
    holds_files = True

    @abstractmethod
    def plan(self, pairs: Pairs) -> Plan:
        """Return the function that reads stored tensors into targets of their shapes."""

    def elements(self, stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Return the elements of a tensor from one number to another, flat."""
        tensor: torch.Tensor = self.read(stored)
        return tensor.flatten()[start:stop]

    def read(self, value: Any) -> Any:
        """Return a part of the state with its tensors in new host memory."""
        memory: dict[int, torch.Tensor] = {}
        pairs: list[tuple[StoredTensor, torch.Tensor]] = []

        def allocate(leaf: StoredTensor) -> torch.Tensor:
            # A step count that parameters shared would be incremented for each of them.
            if id(leaf) not in memory or not leaf.shape:
                memory[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype)
                pairs.append((leaf, memory[id(leaf)]))
            return memory[id(leaf)]

        value = mapped_leaves(value, allocate, StoredTensor)
        if pairs:
            self.plan(pairs)()
        return value


# -- files of full tensors ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FullTensor(StoredTensor, ABC):
    """A full tensor, which can give its elements."""

    @abstractmethod
    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from one number to another, flat."""

    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Read the part that begins at `offsets` and has the shape of a target into it."""
        if target.shape[1:] == self.shape[1:]:  # full rows
            start = offsets[0] * math.prod(self.shape[1:]) if self.shape else 0
            part = self.elements(start, start + target.numel()).view(target.shape)
        else:
            part = self.elements(0, self.shape.numel()).view(self.shape)
            for dim, (start, length) in enumerate(zip(offsets, target.shape, strict=True)):
                part = part.narrow(dim, start, length)
        target.copy_(part)


class TensorInMemory(FullTensor):
    """A tensor in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor.detach()

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Return a view."""
        return self._tensor.flatten()[start:stop]


@dataclass(eq=False)
class TensorInFile(FullTensor):
    """A contiguous tensor in a file, from byte `offset` on."""

    file: "OpenFile"
    offset: int

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Read the elements into new memory."""
        memory = torch.empty(stop - start, dtype=self.dtype)
        self.file.read_into(memory, self.offset + start * self.dtype.itemsize)
        return memory

    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Read the part straight into the memory of a plain target, else through new memory."""
        plain = type(target) is torch.Tensor and target.device.type == "cpu" and target.is_contiguous()
        if not plain or target.dtype is not self.dtype or target.shape[1:] != self.shape[1:] or target.is_conj():
            return super().read_into(target, offsets)
        start = offsets[0] * math.prod(self.shape[1:]) if self.shape else 0
        return self.file.read_into(target, self.offset + start * self.dtype.itemsize)


class OpenFile:
    """A file that is open until this object is released."""

    def __init__(self, path: str) -> None:
        self.descriptor, self._pid = -1, os.getpid()
        durable.require_file(path)
        self._path, self.descriptor = path, os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    # The functions are arguments, since modules may be gone by then. In a fork the number may be that of another file.
    def __del__(self, close: Callable[[int], None] = os.close, pid: Callable[[], int] = os.getpid) -> None:
        if self.descriptor >= 0 and pid() == self._pid:
            close(self.descriptor)

    def stream(self) -> BinaryIO:
        """Return a stream of the file; several streams may be read at a time. A small file is read at once."""
        size = os.fstat(self.descriptor).st_size
        return io.BytesIO(os.pread(self.descriptor, size, 0)) if size < _SMALL else io.BufferedReader(_Stream(self))

    def read_into(self, memory: torch.Tensor, start: int) -> None:
        """Fill a contiguous tensor in host memory with the bytes from `start` on."""
        if not memory.numel():
            return
        view = memory.detach().reshape(-1).view(torch.uint8).numpy().data
        while len(view):
            if not (size := os.preadv(self.descriptor, [view], start)):
                raise OSError(errno.EIO, "the file became shorter while it was read", self._path)
            view, start = view[size:], start + size


class _Stream(io.RawIOBase):
    """Reads an open file at its own position."""

    def __init__(self, file: OpenFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = os.fstat(self._file.descriptor).st_size
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = os.preadv(self._file.descriptor, [buffer], self._position)
        self._position += size
        return size


class FullFiles(Reader):
    """A state of full tensors."""

    def __init__(self, origin: str) -> None:
        self.origin, self.state, self.aliases = origin, dict[str, Any](), {}

    def elements(self, stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Return the elements of a tensor from one number to another, flat."""
        return cast(FullTensor, stored).elements(start, stop)

    def plan(self, pairs: Pairs) -> Plan:
        """Return what reads each tensor, or this rank's parts of it, into its target."""
        reads, size = list[partial[None]](), 0
        for stored, target in pairs:
            pieces = [(target, (0,) * target.dim())] if type(target) is torch.Tensor else _parts_of(target)
            for memory, offsets in pieces:
                size += memory.nbytes
                if memory.numel():
                    reads.append(partial(cast(FullTensor, stored).read_into, memory.detach(), offsets))
        return partial(durable.each, partial.__call__, reads, durable.threads() if size >= _SHARED else 1)

    def open(self, path: str, load_kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the state in a file, whose tensors are read by plans of this reader. Errors are those of `read_whole`."""
        with _naming(path):
            if path.endswith(".safetensors"):  # which has each tensor once
                return _safetensors(path)
            outline = None if load_kwargs else _outline(path, OpenFile(path))
            state = torch_files.load(path, "cpu", **(load_kwargs or {})) if outline is None else outline
            if isinstance(state, Mapping):
                self.aliases = {**self.aliases, **_aliases(state)}
            return mapped_leaves(state, _stored, torch.Tensor) if outline is None else outline


def read_whole(path: str, map_location: Any = None, load_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the state in a file of safetensors or torch's format, in memory.

    UnpicklingError if it holds more than plain data, of which no code ran; DamagedCheckpoint if it is damaged.
    """
    device = str(map_location or "cpu")
    durable.require_file(path)
    with _naming(path):
        if path.endswith(".safetensors"):
            reader = FullFiles(path)
            tensors = reader.read(reader.open(path))
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        return torch_files.load(path, device, **(load_kwargs or {}))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in the error of a library that cannot read it."""
    try:
        yield
    except pickle.UnpicklingError as error:
        if path in str(error):
            raise
        raise pickle.UnpicklingError(
            f"{path} could not be read: {error}\nIf it holds objects of your own and you trust its author, pass "
            "load_kwargs={'weights_only': False} to load_state; that runs code from the file."
        ) from error
    except Exception as error:
        # An error of the disk or of memory says nothing about the bytes of the file, but damaged bytes name offsets that EINVAL refuses.
        is_of_disk = isinstance(error, OSError) and error.errno != errno.EINVAL
        if path in str(error) or is_of_disk or isinstance(error, MemoryError) or should_reduce_batch_size(error):
            raise
        raise DamagedCheckpoint(f"{path} could not be read, so it is damaged: {error!r}") from error


def _aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of tensors that a file has under an earlier name, to that name."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    aliases = same_tensors(tensors, shared_tensor_names(tensors)) if tensors else {}
    first: dict[Any, str] = {}
    for name, value in state.items():
        if isinstance(value, TensorInFile):
            place = value.offset, value.shape, value.dtype
            if first.setdefault(place, name) != name:
                aliases[name] = first[place]
    return aliases


def _stored(value: torch.Tensor) -> Any:
    """Return a plain tensor as a stored one, and others unchanged."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return TensorInMemory(value) if is_plain and not value.is_quantized else value


def _parts_of(tensor: Any) -> list[tuple[torch.Tensor, Sequence[int]]]:
    """Return what this rank has of a tensor: pieces of memory, and where each begins in the tensor."""
    if is_sharded_tensor(tensor):
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    if is_dtensor(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        _, offsets = torch_private.compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        return [(tensor.to_local(), offsets)]
    return [(tensor, (0,) * tensor.dim())]


_DTYPES = {name: dtype for dtype, name in formats.DTYPE_NAMES.items()}


def _safetensors(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name."""
    from safetensors import safe_open

    file = OpenFile(path)
    with safe_open(path, framework="pt"):  # which refuses a header that is not true
        pass
    with open(path, "rb") as header_file:
        length = int.from_bytes(header_file.read(8), "little")
        header = json.loads(header_file.read(length))
    header.pop("__metadata__", None)
    return {
        name: TensorInFile(
            torch.Size(entry["shape"]), _DTYPES[entry["dtype"]], file, 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


# By the names of torch's storages in a pickle, which warn when they are read from torch.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Outline(pickle.Unpickler):
    """Reads the pickle in a file of torch's format, as far as it has contiguous tensors in plain dictionaries and lists.

    Other names are refused. What may be named belongs to this object only, so a pickle that changes it spoils nothing else.
    """

    persistent_load = tuple  # a storage stays what the file says of it

    def __init__(self, path: str, file: OpenFile) -> None:
        data, start_of = torch_private.pickle_and_offsets(path)
        super().__init__(io.BytesIO(data))
        self.tensors = tensors = list[TensorInFile]()

        # It does not refer to this object, which would keep the file open until garbage is collected.
        def tensor(storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> TensorInFile:
            _, kind, record, _, count = storage
            shape, dtype = torch.Size(size), _STORAGES[kind]
            contiguous, step = [], 1
            for length in reversed(shape):
                contiguous.append(step)
                step *= max(length, 1)
            if tuple(contiguous[::-1]) != stride or len(more) > 2 or not 0 <= offset <= count - shape.numel():
                raise pickle.UnpicklingError("it has a tensor that is not contiguous")
            start = start_of(f"data/{record}") + offset * dtype.itemsize
            tensors.append(TensorInFile(shape, dtype, file, start))
            return tensors[-1]

        self._names = {
            ("torch._utils", "_rebuild_tensor_v2"): tensor,
            ("collections", "OrderedDict"): type("OrderedDict", (dict,), {}),
            **{("torch", name): name for name in _STORAGES},
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self._names[module, name]


def _outline(path: str, file: OpenFile) -> Any:
    """Return the state in a file of torch's format with its tensors left in the file.

    Torch's careful reader is written in Python, and takes half of the time of a small load. None for a file that only it can read:
    with other values, with a tensor in a container that `mapped_leaves` does not look into, or that is damaged.
    """
    reached: list[TensorInFile] = []
    try:
        reader = _Outline(path, file)
        state = reader.load()
        mapped_leaves(state, reached.append, TensorInFile)
        return state if len(set(map(id, reached))) == len(reader.tensors) else None
    except Exception:  # who reads the file then says what is wrong
        return None
