"""What files of weights tell of themselves: their tensors, and whether they are damaged, where no manifest tells.

Nothing in a file is trusted, and no code of it runs. Only sharded folders, whose metadata is torch's, need torch.
"""

import io
import json
import math
import os
import zipfile
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from accelerate.checkpoint.manifest import DamagedCheckpoint, TensorEntry, is_inside
from accelerate.checkpoint.names import METADATA

if TYPE_CHECKING:
    from accelerate.checkpoint.readers import Reader

INDEX_SUFFIX = ".index.json"

# The limit of the safetensors library.
_LARGEST_HEADER = 100_000_000
# As many elements no tensor has.
_TOO_LONG = 1 << 63
_ZIP = b"PK\x03\x04"
# Bits of an element. What a later version of safetensors adds is not compared.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


# -- safetensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A tensor in a safetensors file.

    Attributes:
        entry: shape and dtype.
        start: where its bytes start in the file.
        end: where they end.
    """

    entry: TensorEntry
    start: int
    end: int


def header_of(path: str) -> dict[str, Span]:
    """Return the tensors of a safetensors file, by name, in the order of the file.

    Args:
        path: the file; nothing in it is trusted.

    Raises:
        DamagedCheckpoint: it is no safetensors file, or a truncated one.

    Source:
        https://huggingface.co/docs/safetensors/index#format
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise DamagedCheckpoint(f"a header of {length} bytes does not fit a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise DamagedCheckpoint("its header is no mapping")
    header.pop("__metadata__", None)
    spans = {name: _span(name, told, 8 + length) for name, told in header.items()}
    spans = dict(sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)))
    position = 8 + length
    for name, span in spans.items():
        if span.start != position:
            raise DamagedCheckpoint(f"its tensor {name!r} starts at byte {span.start}, not at {position}")
        position = span.end
    if position != size:
        raise DamagedCheckpoint(f"it has {size} bytes, but its tensors end at {position}")
    return spans


def _span(name: str, told: Any, base: int) -> Span:
    try:
        (start, end), shape, dtype = told["data_offsets"], told["shape"], told["dtype"]
        sound = all(type(value) is int and value >= 0 for value in (start, end, *shape)) and isinstance(dtype, str)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or end < start or math.prod(size or 1 for size in shape) >= _TOO_LONG:
        raise DamagedCheckpoint(f"its header says of the tensor {name!r} what cannot be")
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != 8 * (end - start):
        raise DamagedCheckpoint(f"its tensor {name!r} of {dtype} and shape {shape} has {end - start} bytes")
    return Span(TensorEntry(tuple(shape), dtype), base + start, base + end)


def weight_map(text: bytes | str, origin: str) -> dict[str, list[str]]:
    """Return the files that an index of shards names, with the tensors in each.

    Args:
        text: the index, as Hugging Face writes it; nothing in it is trusted.
        origin: where it comes from, for messages.

    Raises:
        DamagedCheckpoint: it is no index.
    """
    try:
        told = json.loads(text)["weight_map"]
        sound = all(isinstance(name, str) and is_inside(file) for name, file in told.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise DamagedCheckpoint(
            f"{origin} is no index of shards: it has no weight_map of tensors and files in its folder"
        )
    files: dict[str, list[str]] = {}
    for name, file in told.items():
        files.setdefault(file, []).append(name)
    return files


# -- whether they are damaged ------------------------------------------------------------------------------------------


def problem_of(path: str) -> str:
    """Return what is wrong with a file by its own account, or an empty text; formats without an account are fine.

    Args:
        path: a file of any format.
    """
    try:
        if path.endswith(".safetensors"):
            header_of(path)
        elif path.endswith(INDEX_SUFFIX):
            return _problem_of_index(path)
        else:
            with open(path, "rb") as file:
                if _is_archive(file):
                    return _problem_of_archive(file)
    except (DamagedCheckpoint, OSError) as error:
        return f"is damaged: {error}"
    return ""


def _problem_of_index(path: str) -> str:
    with open(path, "rb") as file:
        named = weight_map(file.read(_LARGEST_HEADER), "it")
    missing = [name for name in sorted(named) if not os.path.isfile(os.path.join(os.path.dirname(path), name))]
    return f"names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing" if missing else ""


def _is_archive(file: IO[bytes]) -> bool:
    """Whether a file is in torch's format since 1.6, by its beginning or by its end: one of them may have changed."""
    return file.read(len(_ZIP)) == _ZIP or zipfile.is_zipfile(file)


def _problem_of_archive(file: IO[bytes]) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            changed = archive.testzip()
    except Exception as error:  # whatever damaged bytes make of it: another version, an encrypted part, ...
        return f"is damaged: {error or type(error).__name__}"
    return "" if changed is None else f"has changed: the checksum of its part {changed} differs"


def problems_of_shards(folder: str) -> dict[str, str]:
    """Return what is wrong with the files of a folder in torch's sharded format, by name.

    Each piece of a tensor is an archive of its own, with checksums.

    Args:
        folder: one with a ``.metadata`` file.
    """
    from accelerate.checkpoint.readers import read_metadata

    try:
        metadata = read_metadata(folder)
    except DamagedCheckpoint as error:
        return {METADATA: str(error).removeprefix(f"{os.path.join(folder, METADATA)} ")}
    except OSError as error:
        return {METADATA: f"could not be read: {error}"}
    pieces: dict[str, list[tuple[str, Any]]] = {}
    for index, place in metadata.storage_data.items():
        pieces.setdefault(place.file, []).append((index.fqn, place))
    tensors = {name for name, told in metadata.state_dict_metadata.items() if hasattr(told, "size")}
    found = {}
    for name in sorted(pieces):
        try:
            with open(os.path.join(folder, *name.split("/")), "rb", buffering=0) as file:
                problem = _problem_of_pieces(file, pieces[name], tensors)
        except OSError as error:
            problem = f"could not be read: {error}"
        if problem:
            found[name] = problem
    return found


def _problem_of_pieces(file: IO[bytes], pieces: Iterable[tuple[str, Any]], tensors: Container[str]) -> str:
    for name, place in pieces:
        part = _Part(file, place.offset, place.length)
        if _is_archive(part):
            problem = _problem_of_archive(part)
        else:
            problem = "is not in torch's format" if name in tensors else ""
        if problem:
            return f"{problem}, in what it has of {name}"
    return ""


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError(f"there is no byte {at}")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count


# -- what is in shards -------------------------------------------------------------------------------------------------


def tensors_of_shards(folder: str) -> Mapping[str, TensorEntry]:
    """Return the tensors of a folder in torch's sharded format, without reading them.

    Args:
        folder: one with a ``.metadata`` file.

    Raises:
        DamagedCheckpoint: its metadata is damaged.
        OSError: it cannot be read.
    """
    from accelerate.checkpoint.formats import tensor_entry
    from accelerate.checkpoint.readers import FolderReader

    reader = FolderReader(folder)
    found = {}
    for name, key in keys_by_name(reader).items():
        told = reader.metadata.state_dict_metadata[key]
        if hasattr(told, "size"):
            found[name] = tensor_entry(told.size, told.properties.dtype)
    return found


def keys_by_name(reader: "Reader") -> dict[str, str]:
    """Return the names of the values in a sharded folder, and what its metadata calls them.

    Args:
        reader: of the folder.
    """
    specs = list(reader.specs())
    # All of it lies together under one name, such as "model".
    skipped = int(len({steps[0] for steps, _ in specs}) == 1 and all(len(steps) > 1 for steps, _ in specs))
    return {".".join(map(str, steps[skipped:])): key for steps, key in specs}
