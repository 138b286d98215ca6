"""A checkpoint's files: each byte is hashed on its way to the disk, and the file counts as written once the disk has it.

Weights are written as safetensors straight from their memory, without a copy of the whole; everything else in torch's format,
as upstream does. The formats are those of the libraries, which read what is written here.
"""

import collections
import contextlib
import copy
import io
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from accelerate.checkpoint.manifest import FileEntry, TensorEntry
from accelerate.runtime.durable import Path, durable, pieces_of_file

# Numpy's numbers and texts.
NUMPY_KINDS = "biufcSU"

# Gives the file of a path to write to, as `durable` and `CheckpointStorage.create` do.
Create = Callable[[Path], contextlib.AbstractContextManager[Any]]

# What safetensors calls torch's dtypes, as far as this torch has them.
_ODD = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_BITS = {"float": (64, 32, 16), "int": (64, 32, 16, 8), "uint": (64, 32, 16, 8), "complex": (64,)}
_NAMES = _ODD | {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind, sizes in _BITS.items() for bits in sizes}
DTYPE_NAMES = {getattr(torch, dtype): name for dtype, name in _NAMES.items() if hasattr(torch, dtype)}


def tensor_entry(shape: Iterable[int], dtype: torch.dtype) -> TensorEntry:
    """Return what a manifest says of a tensor, of whatever dtype."""
    return TensorEntry(tuple(shape), DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.")))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    rank: int = 0,
    aliases: Mapping[str, str] | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
    create: Create = durable,
) -> FileEntry:
    """Write dense tensors as safetensors, durably; TypeError for what that cannot hold. One process per file.

    `create` gives the file. With `read`, which returns the values of a name, `tensors` are on the meta device, and one at a time is in memory.
    Format: https://huggingface.co/docs/safetensors/index#format
    """
    refuse_unreadable(path)
    # Largest elements first, so that each tensor starts where its dtype may; then by name.
    order = sorted(tensors, key=lambda name: (-check_storable(name, tensors[name]).element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    entries = {name: tensor_entry(tensors[name].shape, tensors[name].dtype) for name in order}
    offset = 0
    for name, entry in entries.items():
        end = offset + tensors[name].nbytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with create(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(bytes_of(tensors[name] if read is None else read(name)))
    return FileEntry.of(file, rank, tensors=entries, aliases=aliases or {})


def check_storable(name: str, tensor: Any) -> torch.Tensor:
    """Return the tensor if safetensors can hold it; raise TypeError with its name if not."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            f"safetensors cannot hold {name!r} ({kind}). Save with safe_serialization=False, or remove it from the state dict."
        )
    return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense tensor as bytes: its own where it is contiguous and on the CPU, else a copy."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def refuse_unreadable(path: Path) -> None:
    """Raise ValueError for a path at which safetensors could be written, and could not be opened again."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{os.fspath(path)!r} is no UTF-8, and safetensors opens no other path. Rename it.") from None


def write_torch(path: Path, obj: Any, rank: int = 0, create: Create = durable) -> FileEntry:
    """Write an object in torch's format, durably, with its numpy numbers as `plain` ones. One process per file."""
    with create(path) as file:
        torch.save(plain(obj), file)
    return FileEntry.of(file, rank)


def write_bytes(path: Path, data: bytes, rank: int = 0, create: Create = durable) -> FileEntry:
    """Write bytes, durably. One process per file."""
    with create(path) as file:
        file.write(data)
    return FileEntry.of(file, rank)


def describe(path: Path, rank: int = 0, threads: int = 1) -> FileEntry:
    """Hash a file that other code wrote, and see to it that the disk has it. Not a collective."""
    size, pieces = pieces_of_file(path, threads)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return FileEntry.made(size, pieces, rank)


# Pickles of longer integers have an instruction that torch's careful reader does not know.
_LONG_INT = 2000
_LARGE_INT = 1 << (_LONG_INT - 1)

# -- states -----------------------------------------------------------------------------------------------------------


# Which no change concerns.
_CONSTANTS: frozenset[type] = frozenset((str, float, bool, bytes, type(None)))
_TENSORS: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter))


def rebuilt(
    state: Any,
    change: Callable[[Any], Any],
    known: dict[int, Any] | None = None,
    constants: Container[type] = _CONSTANTS,
) -> Any:
    """Return a state of the same nested containers, which may contain itself, with its values changed but those of `constants`."""
    known = {} if known is None else known
    if id(state) in known:
        return known[id(state)]
    kind = type(state)
    if kind in (dict, OrderedDict):
        made: Any = kind()
        known[id(state)] = made
        for key, value in state.items():
            if type(value) not in constants:
                value = rebuilt(value, change, known, constants)
            made[key if isinstance(key, (str, torch.Tensor)) else rebuilt(key, change, known, constants)] = value
        if kind is OrderedDict and vars(state):  # a state dict has its version there
            vars(made).update(rebuilt(vars(state), change, known, constants))
        return made
    # Python's random state has 625 integers, which no change concerns.
    if kind in (list, tuple) and {*map(type, state)} == {int} and min(state) > -_LARGE_INT and max(state) < _LARGE_INT:
        return known.setdefault(id(state), kind(state))
    if kind is list:
        made = known[id(state)] = []
        made.extend(
            [value if type(value) in constants else rebuilt(value, change, known, constants) for value in state]
        )
        return made
    if kind is not tuple:
        return change(state)
    return tuple([value if type(value) in constants else rebuilt(value, change, known, constants) for value in state])


class _Call:
    """Is pickled as a call that builds a value. Torch's careful reader cannot fill a deque, for example, but builds a filled one."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


# Arguments of the calls.
_CALLS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    collections.Counter: lambda value: (dict(value),),
    collections.defaultdict: lambda value: (value.default_factory, dict(value)),
    collections.deque: lambda value: (list(value), value.maxlen),
    frozenset: lambda value: (list(value),),
    int: lambda value: (hex(value), 16),
    range: lambda value: (value.start, value.stop, value.step),
    set: lambda value: (list(value),),
    slice: lambda value: (value.start, value.stop, value.step),
    uuid.UUID: lambda value: (value.hex,),
}


def plain(state: Any) -> Any:
    """Return a state that is pickled as torch's careful reader can read it, with Python's numbers for numpy's."""
    known: dict[int, _Call] = {}

    def change(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, np.generic):
            return value.item() if value.dtype.kind in NUMPY_KINDS else value
        if kind not in _CALLS or (kind is int and value.bit_length() < _LONG_INT):
            return value
        if id(value) not in known:
            known[id(value)] = _Call(kind, rebuilt(_CALLS[kind](value), change))
        return known[id(value)]

    return rebuilt(state, change, constants=_CONSTANTS | _TENSORS)


def deep_copied(obj: Any) -> Any:
    """A copy of an object of any kind, as what is saved would come back."""
    try:
        return copy.deepcopy(obj)
    except RuntimeError:  # tensors that are results of a computation refuse, but can be saved
        memory = io.BytesIO()
        torch.save(obj, memory)
        memory.seek(0)
        return torch.load(memory, weights_only=False)  # written here a moment ago
