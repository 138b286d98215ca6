"""One folder of Hugging Face safetensors from the weights of a checkpoint, without the run that wrote them.

Weights go from file to file in pieces: memory holds a few megabytes of them for safetensors, and one tensor for other formats,
however large the model is. What is read is verified first, and the folder appears when all of it is on the disk.
"""

import contextlib
import json
import logging
import math
import os
import pickle
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accelerate.checkpoint import names
from accelerate.checkpoint.inspect import all_files, part_of
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, TensorEntry, problems
from accelerate.checkpoint.places import LocalPlace, Place, State, place_of
from accelerate.checkpoint.structure import INDEX_SUFFIX, header_of, keys_by_name, weight_map
from accelerate.utils.constants import (
    FSDP_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

# A multiple of every element's size.
_PIECE = 4 << 20

_FLOATS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
_ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}

# Some may be called so since their names were taken; see `checkpoint.own`.
_WEIGHTS = re.compile(
    r"(?:(?:model|pytorch_model)(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)"
    rf"|{re.escape(SAFE_WEIGHTS_INDEX_NAME)}|{re.escape(WEIGHTS_INDEX_NAME)})(?:\.former_\d+)?"
)

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Weight:
    """A tensor that can be read.

    Attributes:
        entry: shape and dtype.
        size: in bytes.
        pieces: reads it, piece by piece; a piece is valid until the next one is asked for.
    """

    entry: TensorEntry
    size: int
    pieces: Callable[[], Iterator[memoryview]]

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return max(1, self.size // max(1, math.prod(self.entry.shape)))


@dataclass
class Weights:
    """The weights of a model.

    Attributes:
        tensors: by name, in the order in which they were found.
        aliases: tied names to the name that is among `tensors`.
    """

    tensors: dict[str, Weight] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        files: names and sizes.
        tensors: how many.
        verified: whether the files that were read had checksums.
    """

    files: Mapping[str, int]
    tensors: int
    verified: bool


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    model: int = 0,
    max_shard_size: int = 5_000_000_000,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Exported:
    """Write the weights of a model in a checkpoint as Hugging Face safetensors. One process.

    Args:
        source: the checkpoint, a folder or a URL.
        target: the folder to write, on a file system that is mounted here.
        model: which of the models, in the order in which they were prepared.
        max_shard_size: largest size of a file in bytes; a larger tensor has a file for itself.
        dtype: what floating-point tensors become, a key of `DTYPES`; None leaves them as they are.
        overwrite: replace the weights in `target`. What else is there stays.
        progress: called with the number of bytes that are going to be read; what it returns is called with the bytes
            of each step.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no such model in it.
        FileExistsError: `target` is in use.
        DamagedCheckpoint: a file that would be read is not what was written.
        ValueError: the weights cannot be written like that, or are there more than once.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size={max_shard_size} leaves no room for a tensor.")
    here = place_of(source)
    there = _target(target, here, overwrite)
    state, files = here.state(), {}
    if state.kind == "absent":
        raise FileNotFoundError(f"{here.location!r}: {state.reason}.")
    if state.manifest is not None:
        files = {name: entry.size for name, entry in state.manifest.files.items()}
    elif state.kind == "foreign":
        files = all_files(here)
    else:
        raise DamagedCheckpoint(f"The checkpoint {here.location!r} is incomplete: {state.reason}.")
    wanted = _weight_files(here, files, model)
    step = (lambda size: None) if progress is None else progress(2 * sum(files[name] for name in wanted))
    folder = here.fetch(lambda name: name in wanted)
    _verify(here, folder, state, wanted, step)
    with contextlib.ExitStack() as opened:
        weights = _read(folder, sorted(wanted), opened)
        if state.manifest is not None:
            for name in wanted:
                weights.aliases.update(state.manifest.files[name].aliases)
        written = _write(there, weights, max_shard_size, DTYPES.get(dtype or ""), step)
    return Exported(written, len(weights.tensors), state.manifest is not None)


def _target(target: str | os.PathLike[str], source: Place, overwrite: bool) -> LocalPlace:
    there = place_of(target)
    if not isinstance(there, LocalPlace):
        raise ValueError(f"{there.location!r} is a URL; export to a local folder and copy it there.")
    if there == source or f"{source.location}/".startswith(f"{there.location}/"):
        raise FileExistsError(f"{there.location!r} holds the checkpoint that is to be exported; name another folder.")
    if os.path.lexists(there.location) and not os.path.isdir(there.location):
        raise FileExistsError(f"{there.location!r} is a file; name a folder.")
    found = [*there.files(), *(entry.name for entry in there.entries())]
    if any(name == NAME or (names.is_checkpoint_file(name) and not _WEIGHTS.fullmatch(name)) for name in found):
        raise FileExistsError(
            f"{there.location!r} is a checkpoint, which an export never replaces; name another folder."
        )
    if found and not overwrite:
        raise FileExistsError(
            f"{there.location!r} is not empty. Name another folder, or replace its weights: --overwrite."
        )
    return there


# -- what is read ----------------------------------------------------------------------------------------------------


def _weight_files(place: Place, files: Mapping[str, int], model: int) -> set[str]:
    """The paths of the files that hold a model's weights."""
    part = part_of(files, "model", model, place.location)
    if part is None:
        raise FileNotFoundError(
            f"{place.location!r} has no weights of model {model}: there is no {names.model_file(model)}, "
            f"{names.model_file(model, False)} or {FSDP_MODEL_NAME}_{model}. "
            f"It has {', '.join(sorted(files)) or 'no files'}."
        )
    if part.layout == "sharded":
        return {name for name in files if name.startswith(f"{part.name}/")}
    if not part.name.endswith(INDEX_SUFFIX):
        return {part.name}
    path = os.path.join(place.fetch({part.name}.__contains__), part.name)
    with open(path, "rb") as file:
        shards = set(weight_map(file.read(), path))
    if missing := sorted(shards - set(files)):
        raise FileNotFoundError(f"{place.location!r} has no {', '.join(missing)}, which {part.name} names.")
    return shards


def _verify(place: Place, folder: str, state: State, wanted: set[str], step: Progress) -> None:
    if state.manifest is None:
        logger.warning("%s has no manifest, so its files cannot be verified.", place.location)
        for name in wanted:
            step(os.path.getsize(os.path.join(folder, name)))
        return
    found = problems(folder, state.manifest, deep=True, only=wanted.__contains__, progress=step)
    if found:
        raise DamagedCheckpoint(f"The checkpoint {place.location!r} is damaged: {'; '.join(found)}.")
    if state.kind != "complete":
        logger.warning("%s is incomplete, but its weights are whole: %s.", place.location, state.reason)


def _read(folder: str, files: list[str], opened: contextlib.ExitStack) -> Weights:
    if any("/" in name for name in files):
        return _of_shards(os.path.join(folder, files[0].split("/")[0]))
    weights = Weights()
    for name in files:
        path = os.path.join(folder, name)
        found = _of_safetensors(path, opened) if name.endswith(".safetensors") else _of_torch(path)
        if twice := sorted(set(found.tensors) & set(weights.tensors)):
            raise ValueError(f"{twice[0]!r} is in two of {', '.join(files)}; which of them counts cannot be told.")
        weights.tensors.update(found.tensors)
        weights.aliases.update(found.aliases)
    return weights


def _of_safetensors(path: str, opened: contextlib.ExitStack) -> Weights:
    try:
        header = header_of(path)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{path!r} is damaged: {error}.") from None
    file = open(path, "rb", buffering=0)  # noqa: SIM115
    opened.callback(file.close)

    def weight(start: int, end: int, entry: TensorEntry) -> Weight:
        def pieces() -> Iterator[memoryview]:
            buffer = memoryview(bytearray(min(_PIECE, end - start)))
            file.seek(start)
            position = start
            while position < end:
                filled, size = 0, min(_PIECE, end - position)
                while filled < size:
                    count = file.readinto(buffer[filled:size])
                    if not count:
                        raise DamagedCheckpoint(f"{path!r} became shorter while it was read.")
                    filled += count
                position += size
                yield buffer[:size]

        return Weight(entry, end - start, pieces)

    return Weights({name: weight(span.start, span.end, span.entry) for name, span in header.items()})


def _of_torch(path: str) -> Weights:
    import torch

    try:
        try:
            # The system reads what is used, and forgets it when memory runs short.
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # the format of torch before 1.6
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path!r} holds more than weights, and is not read: {error}") from error
    except (RuntimeError, EOFError) as error:
        raise DamagedCheckpoint(f"{path!r} could not be read: {error}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path!r} holds a {type(state).__name__}, not a state dict.")
    return _of_state_dict(state, path)


def _of_state_dict(state: Mapping[str, Any], origin: str) -> Weights:
    """The weights of a state dict in memory, tied ones once."""
    from accelerate.checkpoint import formats
    from accelerate.modules.tensors import shared_tensor_names

    weights = Weights()

    first_of: dict[str, str] = {}
    for group in shared_tensor_names(state):
        views: dict[Any, str] = {}
        for name in group:  # what only overlaps is different data
            tensor = state[name]
            first = views.setdefault((tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()), name)
            if first != name:
                first_of[name] = first
    for name, tensor in state.items():
        try:
            formats.check_storable(name, tensor)
        except TypeError as error:
            raise ValueError(f"{origin!r} cannot be exported: {str(error).partition('. ')[0]}.") from None
        if name in first_of:
            weights.aliases[name] = first_of[name]
        else:
            weights.tensors[name] = _weight(tensor.dtype, tensor.shape, lambda tensor=tensor: tensor)
    return weights


def _weight(dtype: "torch.dtype", shape: Sequence[int], read: "Callable[[], torch.Tensor]") -> Weight:
    from accelerate.checkpoint import formats

    def pieces() -> Iterator[memoryview]:
        data = formats.bytes_of(read())
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]

    entry = TensorEntry(tuple(shape), formats.dtype_name(dtype))
    return Weight(entry, math.prod(shape) * dtype.itemsize, pieces)


def _of_shards(folder: str) -> Weights:
    """The weights in torch's sharded format, each put together when it is asked for."""
    import torch

    from accelerate.checkpoint.dcp import FolderReader

    reader = FolderReader(folder)
    weights = Weights()
    for name, key in keys_by_name(reader).items():
        stored = reader.metadata.state_dict_metadata[key]
        if not hasattr(stored, "properties"):
            raise ValueError(f"{folder!r} cannot be exported: safetensors cannot hold {name!r}, which is no tensor.")
        dtype, shape = stored.properties.dtype, tuple(stored.size)

        def read(key: str = key, dtype: torch.dtype = dtype, shape: tuple[int, ...] = shape) -> torch.Tensor:
            return reader.fill({key: torch.empty(shape, dtype=dtype)})[key]

        weights.tensors[name] = _weight(dtype, shape, read)
    return weights


# -- what is written -------------------------------------------------------------------------------------------------


def _write(there: LocalPlace, weights: Weights, limit: int, dtype: str | None, step: Progress) -> dict[str, int]:
    plain = {name.replace("_orig_mod.", ""): name for name in weights.tensors}  # torch.compile's part of a name
    if len(plain) < len(weights.tensors):
        raise ValueError("Two tensors have one name once torch.compile's part of it, `_orig_mod.`, is left out.")
    aliases = {
        name.replace("_orig_mod.", ""): kept.replace("_orig_mod.", "") for name, kept in weights.aliases.items()
    }
    tensors = {name: _converted(name, _counted(weights.tensors[old], step), dtype) for name, old in plain.items()}
    shards = _split(tensors, limit)
    folder, written = there.stage(), {}
    try:
        weight_of, count = {}, len(shards)
        for number, shard in enumerate(shards, 1):
            suffix = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
            file = SAFE_WEIGHTS_PATTERN_NAME.format(suffix=suffix)
            tied = {name: kept for name, kept in aliases.items() if kept in shard and name not in tensors}
            written[file] = _write_file(os.path.join(folder, file), {name: tensors[name] for name in shard}, tied)
            weight_of.update(dict.fromkeys(shard, file))
        # Whoever finds the index of an earlier export beside a single file may go by the index.
        if count > 1 or SAFE_WEIGHTS_INDEX_NAME in there.files():
            index = {"metadata": {"total_size": sum(w.size for w in tensors.values())}, "weight_map": weight_of}
            size = _write_index(os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME), index)
            if count > 1:
                written[SAFE_WEIGHTS_INDEX_NAME] = size
        there.publish()
    except BaseException:
        there.abandon()
        raise
    _clear(there, written)
    return written


def _clear(there: LocalPlace, written: Container[str]) -> None:
    """Remove the weights of an earlier export, which were carried over with the user's own files."""
    # The index goes last: until then it names what was written now.
    for name in sorted(there.files(), key=lambda name: name == SAFE_WEIGHTS_INDEX_NAME):
        if _WEIGHTS.fullmatch(name) and name not in written:
            os.unlink(os.path.join(there.location, name))


def _split(tensors: Mapping[str, Weight], limit: int) -> list[list[str]]:
    """Fill file after file, in the order of the tensors."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, weight in tensors.items():
        if shards[-1] and filled + weight.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += weight.size
    return shards


def _counted(weight: Weight, step: Progress) -> Weight:
    def pieces() -> Iterator[memoryview]:
        for piece in weight.pieces():
            yield piece
            step(len(piece))

    return replace(weight, pieces=pieces)


def _converted(name: str, weight: Weight, dtype: str | None) -> Weight:
    kind = weight.entry.dtype
    if dtype is None or kind == dtype or not kind.startswith(("F", "BF")):
        return weight
    if kind not in _FLOATS:
        raise ValueError(f"{name!r} is of {kind}, which is not converted; export it without another dtype.")

    def pieces() -> Iterator[memoryview]:
        import torch

        old, new = getattr(torch, _FLOATS[kind]), getattr(torch, _FLOATS[dtype])
        for piece in weight.pieces():
            values = torch.frombuffer(piece, dtype=torch.uint8).view(old)
            if old.itemsize == 1:  # torch can do little else with these
                values = values.float()
            made = values.to(new)
            if not torch.equal(torch.isinf(made), torch.isinf(values)):
                raise ValueError(f"{name!r} has values that {dtype} cannot hold; export it in another dtype.")
            yield memoryview(made.view(torch.uint8).numpy())

    size = math.prod(weight.entry.shape) * _ITEM_SIZES[dtype]
    return Weight(TensorEntry(weight.entry.shape, dtype), size, pieces)


def _write_file(path: str, tensors: Mapping[str, Weight], tied: Mapping[str, str]) -> int:
    """Write a safetensors file; tied names stand in its metadata, where huggingface_hub looks for them."""
    from accelerate.checkpoint import formats

    order = sorted(tensors, key=lambda name: (-tensors[name].item_size, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    offset = 0
    for name in order:
        weight = tensors[name]
        span = [offset, offset + weight.size]
        header[name] = {"dtype": weight.entry.dtype, "shape": list(weight.entry.shape), "data_offsets": span}
        offset += weight.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with formats.durable(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            for piece in tensors[name].pieces():
                file.write(piece)
    return 8 + len(text) + offset


def _write_index(path: str, index: Mapping[str, Any]) -> int:
    from accelerate.checkpoint import formats

    text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    with formats.durable(path) as file:
        file.write(text)
    return len(text)
