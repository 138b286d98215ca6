"""A checkpoint's files: each byte is hashed on its way to the disk, and the file counts as written once the disk has it.

Weights are written as safetensors straight from their memory, without a copy of the whole; everything else in torch's format,
as upstream does. The formats are those of the libraries, which read what is written here.
"""

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from accelerate.checkpoint.manifest import DamagedCheckpoint, FileEntry, TensorEntry
from accelerate.runtime.durable import durable, of_file
from accelerate.utils.other import load

Path = str | os.PathLike[str]

# What safetensors calls torch's dtypes, as far as this torch has them.
DTYPE_NAMES = {
    getattr(torch, dtype): name
    for dtype, name in {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
    }.items()
    if hasattr(torch, dtype)
}


def tensor_entry(shape: Iterable[int], dtype: torch.dtype) -> TensorEntry:
    """Return what a manifest says of a tensor, of whatever dtype.

    Args:
        shape: its shape.
        dtype: its dtype.
    """
    return TensorEntry(tuple(shape), DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.")))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    rank: int = 0,
    aliases: Mapping[str, str] | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
) -> FileEntry:
    """Write tensors as safetensors, durably. One process per file.

    Args:
        path: the file.
        tensors: by name; dense, on any device.
        metadata: texts by name.
        rank: who writes.
        aliases: names that share the memory of a tensor and are left out, for the manifest.
        read: returns the values of a name, if `tensors` are on the meta device: one at a time is in memory then.

    Raises:
        TypeError: a value is no dense tensor, or of a dtype that safetensors does not have.

    Source:
        https://huggingface.co/docs/safetensors/index#format
    """
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
    with durable(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(bytes_of(tensors[name] if read is None else read(name)))
    return FileEntry.of(file, rank, tensors=entries, aliases=aliases or {})


def check_storable(name: str, tensor: Any) -> torch.Tensor:
    """Return the tensor if safetensors can hold it.

    Args:
        name: its name, for the message.
        tensor: any value.

    Raises:
        TypeError: it is no dense tensor, or of a dtype that safetensors does not have.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            f"safetensors cannot hold {name!r} ({kind}). Save with safe_serialization=False, or leave it out of the state dict."
        )
    return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense tensor as bytes: its own where it is contiguous and on the CPU, else a copy.

    Args:
        tensor: of any dtype and device.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def write_torch(path: Path, obj: Any, rank: int = 0) -> FileEntry:
    """Write an object in torch's format, durably, with its numpy numbers as `plain` ones. One process per file.

    Args:
        path: the file.
        obj: what `torch.save` takes.
        rank: who writes.
    """
    with durable(path) as file:
        torch.save(plain(obj), file)
    return FileEntry.of(file, rank)


def write_bytes(path: Path, data: bytes, rank: int = 0) -> FileEntry:
    """Write bytes, durably. One process per file.

    Args:
        path: the file.
        data: its content.
        rank: who writes.
    """
    with durable(path) as file:
        file.write(data)
    return FileEntry.of(file, rank)


def describe(path: Path, rank: int = 0, threads: int = 1) -> FileEntry:
    """Hash a file that other code wrote, and see to it that the disk has it. Any rank, alone.

    Args:
        path: the file.
        rank: who speaks for it.
        threads: how many pieces are hashed at a time.
    """
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    size, digest = of_file(path, threads)
    return FileEntry(size, digest, rank)


def mapped(path: Path) -> Any:
    """Return what a file of tensors holds; their memory is the file's, read when it is touched and not written back.

    Args:
        path: a file in safetensors' or torch's format.

    Raises:
        UnpicklingError: it holds objects that are not plain data; no code of it ran.
        DamagedCheckpoint: it is damaged.
    """
    try:
        if os.fspath(path).endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        try:
            return load(path, "cpu", mmap=True)
        except (
            NotImplementedError,
            RuntimeError,
        ):  # tensors that have no plain memory, and files from before torch 1.6
            return load(path, "cpu")
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as error:  # whatever a damaged file runs into
        raise DamagedCheckpoint(f"{os.fspath(path)} could not be read: {error!r}") from error


def rebuilt(state: Any, change: Callable[[Any], Any], known: dict[int, Any] | None = None) -> Any:
    """Return a state of the same containers, whose values have been changed.

    Args:
        state: nested containers; it may contain itself.
        change: returns what stands for a value.
        known: what was rebuilt already, by id.
    """
    known = {} if known is None else known
    if id(state) in known:
        return known[id(state)]
    if type(state) in (dict, OrderedDict):
        made = known[id(state)] = type(state)()
        made.update([(key, rebuilt(value, change, known)) for key, value in state.items()])
        if type(state) is OrderedDict:
            vars(made).update(rebuilt(vars(state), change, known))  # a state dict has its version there
        return made
    if type(state) is list:
        made = known[id(state)] = []
        made.extend([rebuilt(value, change, known) for value in state])
        return made
    return tuple([rebuilt(value, change, known) for value in state]) if type(state) is tuple else change(state)


def plain(state: Any) -> Any:
    """Return a state in which Python's numbers stand for numpy's, which readers refuse that trust nothing, upstream's among them.

    A schedule that computes with numpy makes the learning rate one.

    Args:
        state: nested containers; they are not changed.
    """
    return rebuilt(state, lambda value: value.item() if isinstance(value, np.generic) else value)


def in_memory(state: Any) -> Any:
    """Return a state with plain tensors of its own memory, where those of `mapped` are the file's.

    Args:
        state: nested containers; they are not changed.
    """
    plain_tensors = (torch.Tensor, torch.nn.Parameter)
    return rebuilt(state, lambda value: value.clone() if type(value) in plain_tensors else value)


def storages(state: Any) -> set[int]:
    """Return the addresses of the memory that the plain tensors of a state have.

    Args:
        state: nested containers.
    """
    if type(state) is torch.Tensor:
        return {state.untyped_storage().data_ptr()}
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return set().union(*map(storages, children))
