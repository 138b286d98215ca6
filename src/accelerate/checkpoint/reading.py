"""Reading the tensors of a checkpoint: from the disk once, hashed once, and into the memory where they stay if they can.

A checkpoint that is not large is read in full while it is verified, before anything changes. Of a large one that would mean
to hold the state twice, so its files are verified first, and its tensors, `Pending` until then, are read at the end into the
memory of those that they replace. What nothing is replaced by, as the state of an optimizer that has not been stepped, is read
in full at any size, and is not copied: the optimizer takes the memory over.
"""

import contextlib
import io
import math
import os
import pickle
import struct
import sys
import weakref
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from accelerate.checkpoint import checksum, formats
from accelerate.checkpoint.inspect import header_of
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.memory import fresh
from accelerate.checkpoint.threads import each

# What a rank holds, at most, of a checkpoint in addition to the state that it replaces. Beyond that, tensors are replaced in
# place, and a disk that fails in the middle of that leaves a part of them replaced.
SPARE = 16 << 20

# Tensors of at most so many bytes get memory of their own at once.
SMALL = 64 << 10

_PIECE = 16 << 20
_CPU = torch.device("cpu")
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_PLAIN = frozenset((type(None), bool, int, float, str))
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_DTYPES = {name: dtype for dtype, name in formats.DTYPE_NAMES.items()}


class Unusual(Exception):
    """A file that only its library can read. Not an error of the file."""


def threads() -> int:
    """Return how many threads of this process may read at a time: the processes of a node share its processors."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))))


class Reading(os.PathLike[str]):
    """The folder of a checkpoint that is being loaded. It is path-like, for those who read files by themselves.

    Args:
        folder: the local folder.
        wanted: names of the files of tensors that are going to be read, and of each whether its tensors stay where they are
            read to and replace nothing, as those of an optimizer that has not been stepped.
    """

    def __init__(self, folder: str, wanted: Mapping[str, bool] | None = None) -> None:
        self.folder = folder
        spare = {}
        for name, stays in (wanted or {}).items():
            with contextlib.suppress(OSError):
                size = os.path.getsize(os.path.join(folder, name))
                spare[name] = 0 if stays else size
        fits = sum(spare.values()) <= SPARE
        self.in_full = frozenset(name for name, size in spare.items() if fits or not size)
        self._memory: dict[str, torch.Tensor] = {}
        self._known = frozenset(spare)

    def __fspath__(self) -> str:
        return self.folder

    def checksum(self, name: str) -> str:
        """Return the checksum of a file; what is going to be read in full is read by that. Any rank, alone.

        Args:
            name: its path in the folder.
        """
        path = os.path.join(self.folder, *name.split("/"))
        if name not in self.in_full:
            return checksum.of_file(path, threads())[1]
        memory = fresh(os.path.getsize(path))
        digest = checksum.of_file(path, threads(), into=memoryview(memory.numpy()))[1]
        self._memory[name] = memory
        return digest

    def content(self, name: str) -> Any:
        """Return what a file has, once. Any rank, alone.

        Args:
            name: of a file of tensors, directly in the folder.

        Returns:
            What its library would return; some of its tensors may be `Pending`.

        Raises:
            Unusual: its library has to read it.
        """
        if name not in self._known:
            raise Unusual(f"{name} was not announced")
        memory = self._memory.pop(name, None)
        source = _Source(os.path.join(self.folder, name), memory)
        if memory is None and name in self.in_full:
            source.fill()
        return _from_safetensors(source) if name.endswith(".safetensors") else _from_torch(source)


class _Source:
    """A file of tensors that stays open, whatever becomes of its name. Its content may be in memory."""

    def __init__(self, path: str, memory: torch.Tensor | None) -> None:
        self.path = path
        self.memory = memory
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def fill(self) -> None:
        self.memory = fresh(os.fstat(self._descriptor).st_size)
        self.read(0, memoryview(self.memory.numpy()))

    def read(self, start: int, target: memoryview) -> None:
        """Read from a place in the file until the target is full."""

        def piece(offset: int) -> None:
            end = min(offset + _PIECE, len(target))
            while offset < end:
                length = checksum.read_at(self._descriptor, target[offset:end], start + offset)
                if not length:
                    raise OSError(f"{self.path!r} became shorter while it was read")
                offset += length

        each(piece, range(0, len(target), _PIECE), threads())

    def storage(self, start: int, size: int, aligned: int) -> torch.UntypedStorage:
        """Return a part of the file; it shares the memory of the whole, unless it is small or lies badly."""
        if self.memory is not None and size > SMALL and start % aligned == 0:
            whole = self.memory.numpy()
            return torch.frombuffer(whole, dtype=torch.uint8, offset=start, count=size).untyped_storage()
        if self.memory is not None:
            return self.memory[start : start + size].clone().untyped_storage()
        made = fresh(size)
        if size:
            self.read(start, memoryview(made.numpy()))
        return made.untyped_storage()


# -- formats -------------------------------------------------------------------------------------------------------


def _from_safetensors(source: _Source) -> dict[str, torch.Tensor]:
    try:
        spans = header_of(source.path)
    except DamagedCheckpoint as error:
        raise Unusual(str(error)) from error
    found = {}
    for name, span in spans.items():
        dtype, shape = _DTYPES.get(span.entry.dtype), span.entry.shape
        size = span.end - span.start
        if dtype is None or math.prod(shape) * dtype.itemsize != size:
            raise Unusual(f"{name} has the dtype {span.entry.dtype}")
        like = torch.empty(shape, dtype=dtype, device="meta")
        if source.memory is None and size > SMALL:
            found[name] = Pending(like, source, span.start, dtype)
        else:
            found[name] = _view(like, source.storage(span.start, size, dtype.itemsize), 0)
    return found


def _view(like: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype).set_(storage, offset, like.shape, like.stride())


def _from_torch(source: _Source) -> Any:
    """Read the structure of a file of torch, and put the tensors into it.

    Torch's own reader of structures that run no code is written in Python, and takes longer than all the rest where tensors
    are small. This one is Python's own, which may do nothing here but build containers and describe tensors.
    """
    try:
        records, structure = _records(source.path)
        tree = _Structure(structure).load()
    except Exception as error:  # torch knows more kinds of objects, and says better what is wrong
        raise Unusual(f"{type(error).__name__}: {error}") from error
    return _tensors(tree, records, source)


def _tensors(tree: Any, records: Mapping[str, tuple[int, int]], source: _Source) -> Any:
    """Put tensors into a structure."""
    users: Counter[str] = Counter()

    def count(told: _Told) -> _Told:
        users[told.storage.key] += 1
        return told

    _walk(tree, count)
    storages: dict[str, torch.UntypedStorage] = {}

    def tensor(told: _Told) -> torch.Tensor:
        storage = told.storage
        start, size = records.get(storage.key, (0, 0))
        if size != storage.count * storage.dtype.itemsize:
            raise Unusual(f"a storage of {size} bytes that should have {storage.count} elements of {storage.dtype}")
        if source.memory is None and size > SMALL and users[storage.key] == 1:
            like = torch.empty_strided(told.shape, told.stride, dtype=storage.dtype, device="meta")
            if storage.count == like.numel() and _has_no_gaps(like):
                return Pending(like, source, start, storage.dtype)
        if storage.key not in storages:
            storages[storage.key] = source.storage(start, size, storage.dtype.itemsize)
        made = torch.empty(0, dtype=storage.dtype).set_(storages[storage.key], told.offset, told.shape, told.stride)
        return nn.Parameter(made, told.requires_grad) if told.is_parameter else made

    return _walk(tree, tensor)


def _records(path: str) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Where in a file the bytes of each storage lie and how many they are, and the description of the structure."""
    found: dict[str, tuple[int, int]] = {}
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        for record in archive.infolist():
            file.seek(record.header_offset + 26)
            # The name and what else comes before the content.
            start = record.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
            if record.compress_type != zipfile.ZIP_STORED or start + record.file_size > size:
                raise Unusual("a compressed or truncated file")
            found[record.filename.partition("/")[2]] = (start, record.file_size)

        def content(name: str) -> bytes:
            start, length = found[name]
            file.seek(start)
            return file.read(length)

        if "byteorder" in found and content("byteorder") != sys.byteorder.encode():
            raise Unusual("another byte order")
        structure = content("data.pkl")
    return {name.removeprefix("data/"): place for name, place in found.items() if name.startswith("data/")}, structure


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    count: int


class _Told(NamedTuple):
    """What a file says of a tensor."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool


class _Rebuild:
    """Stands for torch's functions that make tensors. Nothing can be assigned to it."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any) -> _Told:
        counts = (offset, *shape, *stride)
        sound = type(storage) is _Storage and not hooks and all(type(count) is int and count >= 0 for count in counts)
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if sound else 0
        if not sound or 0 not in shape and last >= storage.count:
            raise Unusual("a tensor that cannot be")
        return _Told(storage, offset, tuple(shape), tuple(stride), bool(requires_grad), False)


class _RebuildParameter:
    """The same for parameters."""

    __slots__ = ()

    def __call__(self, data: Any, requires_grad: Any, hooks: Any) -> _Told:
        if type(data) is not _Told or hooks:
            raise Unusual("a parameter that cannot be")
        return data._replace(requires_grad=bool(requires_grad), is_parameter=True)


class _Structure(pickle.Unpickler):
    """Reads containers, numbers, texts and descriptions of tensors; all else, and so any code, is refused.

    Source:
        https://docs.python.org/3/library/pickle.html#restricting-globals
    """

    _KNOWN: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
        ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
        **{("torch", f"{kind}Storage"): dtype for kind, dtype in _STORAGES.items()},
    }

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a global name of the file."""
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise Unusual(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> _Storage:
        """Return what a file says of a storage."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or type(dtype) is not torch.dtype or type(key) is not str or type(count) is not int:
            raise Unusual("a storage that cannot be")
        return _Storage(key, dtype, count)


def _has_no_gaps(like: torch.Tensor) -> bool:
    return like.is_contiguous() or like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)


def _walk(obj: Any, replace: Callable[[_Told], Any], seen: set[int] | None = None) -> Any:
    """Put something else in the places of the tensors of nested containers; those change in place where they can."""
    seen = set() if seen is None else seen
    if type(obj) is _Told:
        return replace(obj)
    if type(obj) in (dict, OrderedDict, list):
        if id(obj) not in seen:
            seen.add(id(obj))
            for key, value in list(obj.items() if type(obj) is not list else enumerate(obj)):
                if type(value) not in _PLAIN:
                    obj[key] = _walk(value, replace, seen)
        return obj
    if type(obj) is tuple:
        return tuple(_walk(value, replace, seen) for value in obj)
    if type(obj) in _PLAIN:
        return obj
    raise Unusual(f"a {type(obj).__name__}")


# -- tensors that are still in the file ----------------------------------------------------------------------------


class Pending(torch.Tensor):
    """A tensor whose values are still in its file.

    Copying it into another tensor reads them into that one's memory. Whatever else is done with it reads them first.

    Args:
        like: a tensor on the meta device, without gaps, of the shape, strides and dtype that are wanted.
        source: the file.
        start: where in it the values begin.
        stored: their dtype there.
        place: the device that is wanted.
    """

    _source: _Source
    _start: int
    _stored: torch.dtype
    _place: torch.device

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, source: _Source, start: int, stored: torch.dtype, place: torch.device = _CPU
    ) -> "Pending":
        made = like.as_subclass(cls)
        made._source, made._start, made._stored, made._place = source, start, stored, place
        return made

    def into(self, target: torch.Tensor) -> torch.Tensor:
        """Read the values into a tensor of the same shape, and return it.

        Args:
            target: of any device, dtype and strides.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if target.stride() != self.stride():
                target.copy_(self.into(torch.empty_strided(self.shape, self.stride(), dtype=self._stored)))
                return target
            # Neither has gaps, so the elements lie in the same order.
            flat = target.detach().as_strided((target.numel(),), (1,))
            if flat.device == _CPU and flat.dtype == self._stored:
                self._source.read(self._start, _memory_of(flat))
            else:
                self._convert(flat)
        return target

    def _convert(self, flat: torch.Tensor) -> None:
        size = self._stored.itemsize
        count = min(_PIECE // size, flat.numel())
        scratch = torch.empty(count, dtype=self._stored, pin_memory=flat.device.type == "cuda")
        for first in range(0, flat.numel(), count):
            part = scratch[: flat.numel() - first]
            self._source.read(self._start + first * size, _memory_of(part))
            flat[first : first + len(part)].copy_(part)

    def read(self) -> torch.Tensor:
        """Return a tensor with the values, where they are wanted."""
        with torch._C.DisableTorchFunctionSubclass():
            if (self._place, self.dtype) == (_CPU, self._stored):
                size = self._stored.itemsize
                return _view(self, self._source.storage(self._start, self.numel() * size, size), 0)
            return self.into(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self._place))

    def fits(self, other: Any) -> bool:
        """Say whether a tensor is like this one would be, so that it can take the values in its place.

        Args:
            other: any value.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return (
                type(other) in _PLAIN_TENSORS
                and (other.device, other.dtype, other.shape) == (self._place, self.dtype, self.shape)
                and other.stride() == self.stride()
            )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what torch is asked to do, with the values; see the class."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _TOLD:
                return func(*args, **kwargs)
            if func in _TOLD_OTHERWISE:
                return _TOLD_OTHERWISE[func](args[0])
            if func is torch.Tensor.to and not args[1:] and kwargs.keys() <= {"device", "dtype", "non_blocking"}:
                return _moved(args[0], kwargs.get("device"), kwargs.get("dtype"))
            if func is torch.Tensor.copy_ and type(args[0]) in _PLAIN_TENSORS and args[0].shape == args[1].shape:
                return args[1].into(args[0])
        name = getattr(func, "__name__", "")
        if isinstance(args[0], Pending) and name.endswith("_") and not name.endswith("__"):
            raise RuntimeError(f"{name} would change a tensor that is still in {args[0]._source.path!r}")
        return func(*read_in_full(args), **read_in_full(kwargs))


def _moved(tensor: Pending, device: Any, dtype: torch.dtype | None) -> Pending:
    """The same, wanted elsewhere or of another dtype."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    place = tensor._place if device is None else torch.device(device)
    return Pending(like, tensor._source, tensor._start, tensor._stored, place)


def _memory_of(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.view(torch.uint8).numpy())


# What is known without the values.
_TOLD = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.layout.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
}
_TOLD_OTHERWISE: dict[Any, Callable[[Pending], Any]] = {
    torch.Tensor.device.__get__: lambda tensor: tensor._place,
    torch.Tensor.is_meta.__get__: lambda tensor: False,
}


def read_in_full(state: Any) -> Any:
    """Return nested containers with the values of all tensors in them.

    Args:
        state: from `Reading.content`; it is not changed.
    """
    if isinstance(state, Pending):
        return state.read()
    if type(state) in (dict, OrderedDict):
        return type(state)((key, read_in_full(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(read_in_full(value) for value in state)
    return state


def is_pending(state: Any) -> bool:
    """Say whether values of a nested state are still in a file.

    Args:
        state: from `Reading.content`, or any other.
    """
    if isinstance(state, Mapping):
        return any(is_pending(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return any(is_pending(value) for value in state)
    return isinstance(state, Pending)
