"""A checkpoint's files: each byte is hashed on its way to the disk, and the file counts as written once the disk has it.

Weights are written as safetensors straight from their memory, without a copy of the whole; everything else in torch's format,
as upstream does. The formats are those of the libraries, which read what is written here.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from accelerate.checkpoint.manifest import FileEntry, TensorEntry
from accelerate.checkpoint.plain_data import plain
from accelerate.runtime.durable import Path, durable, pieces_of_file

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
    sizes = {name: check_storable(name, tensor).element_size() for name, tensor in tensors.items()}
    order = sorted(sorted(sizes), key=sizes.__getitem__, reverse=True)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    entries, offset = {}, 0
    for name in order:
        tensor = tensors[name]
        entries[name] = entry = tensor_entry(tensor.shape, tensor.dtype)
        end = offset + tensor.nbytes
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
    """Write an object in torch's format, durably, with uncommon values as `plain` ones. One process per file."""
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
