"""Weights on a disk: which files belong to the model that a path names, and what their headers tell. Nothing is loaded."""

import contextlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from accelerate.checkpoint.inspect import INDEX_SUFFIX, header_of, tensors_of_shards, weight_map
from accelerate.checkpoint.manifest import METADATA, DamagedCheckpoint, TensorEntry, is_generators_file
from accelerate.commands.estimation.inventory import Inventory, of_tensors
from accelerate.launch.errors import LaunchError
from accelerate.utils.constants import FSDP_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

CONFIG = "config.json"
SUFFIX = ".safetensors"

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
# Formats whose tensors cannot be listed without running what is in them, or that are not known here.
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
_LARGEST_JSON = 100_000_000

# Names of element types have the number of bits behind a letter or two: "BF16", "F8_E4M3"; only "BOOL" has none.
_BITS = re.compile(r"[A-Z]{1,2}(\d{1,3})(?:_\w+)?")

Tensors = dict[str, TensorEntry]


def of_path(path: str) -> Inventory | None:
    """Return what the weights at a path consist of.

    Args:
        path: a safetensors file, an index of several, a folder with one or the other or with shards as torch's distributed
            checkpoints have them, or a JSON file.

    Returns:
        The model; None if there are no weights, but a configuration: the JSON file itself, or `config.json` in the folder.

    Raises:
        LaunchError: there is nothing of that, several models, or something damaged.
    """
    if os.path.isdir(path):
        return _of_folder(path)
    if not os.path.isfile(path):
        raise LaunchError(f"{path!r} is neither a regular file nor a folder.")
    if path.endswith(SUFFIX):
        return _of_files({path: ()})
    if path.endswith(".json"):
        return _of_index(path) if path.endswith(INDEX_SUFFIX) or b'"weight_map"' in _text(path) else None
    raise LaunchError(
        f"{path!r} is no file whose tensors can be listed without loading it. Name a .safetensors file, its .index.json, a "
        "config.json, or a folder with one of them."
    )


def _of_folder(folder: str) -> Inventory | None:
    with _reading(folder):
        names = sorted(os.listdir(folder))
    if METADATA in names:
        return _of_shards(folder)
    models = _models(folder, names)
    # What libraries load from a folder; others may lie beside it, such as the same weights in their author's layout.
    usual = next((name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if name in models), None)
    if usual is not None and not _second_models(names):
        return models[usual]()
    if len(models) > 1:
        raise _several(folder, models)
    if models:
        return next(iter(models.values()))()
    if os.path.isfile(os.path.join(folder, CONFIG)):
        return None
    inside = [name for name in names if _has_model(os.path.join(folder, name))]
    if inside:
        raise _several(folder, inside)
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    hint = (
        f" The tensors of {others[0]} cannot be listed without loading it; add the model's config.json."
        if others
        else ""
    )
    raise LaunchError(f"{folder!r} has no model: neither a .safetensors file nor a config.json is in it.{hint}")


def _second_models(names: Iterable[str]) -> list[str]:
    """Weights of further models, as our checkpoints number them."""
    return [name for name in names if re.fullmatch(r"model_\d+\.safetensors(\.index\.json)?", name)]


def _models(folder: str, names: Iterable[str]) -> dict[str, Callable[[], Inventory]]:
    """Return how to read each model in a folder, by the name of its file, index or sharded folder."""
    found: dict[str, Callable[[], Inventory]] = {}
    shards: dict[str, list[str]] = defaultdict(list)
    indexed = {
        name.removesuffix(f"{SUFFIX}{INDEX_SUFFIX}") for name in names if name.endswith(f"{SUFFIX}{INDEX_SUFFIX}")
    }
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith(FSDP_MODEL_NAME) and os.path.isfile(os.path.join(path, METADATA)):
            found[name] = lambda path=path: _of_shards(path)
        elif name.endswith(f"{SUFFIX}{INDEX_SUFFIX}"):
            found[name] = lambda path=path: _of_index(path)
        elif (part := _SHARD.fullmatch(name)) is not None:
            if part[1] not in indexed:
                shards[f"{part[1]}-*-of-{part[3]}{SUFFIX}"].append(path)
        elif name.endswith(SUFFIX) and not is_generators_file(name) and os.path.isfile(path):
            found[name] = lambda path=path: _of_files({path: ()})
    for name, paths in shards.items():
        found[name] = lambda name=name, paths=paths: _of_numbered(name, paths)
    return found


def _has_model(path: str) -> bool:
    if not os.path.isdir(path):
        return False
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return CONFIG in names or METADATA in names or any(name.endswith(SUFFIX) for name in names)


def _several(folder: str, names: Iterable[str]) -> LaunchError:
    names = [name if name.isprintable() else repr(name) for name in names]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    which = "several models" if len(names) > 1 else "no model of its own"
    return LaunchError(f"{folder!r} has {which}: {shown}. Name one, as in {os.path.join(folder, names[0])}.")


def _of_numbered(name: str, paths: list[str]) -> Inventory:
    wanted = int(name.removesuffix(SUFFIX).rpartition("-of-")[2])
    if len(paths) != wanted:
        raise LaunchError(
            f"{name}: {len(paths)} of {wanted} files are there. Download the others, or name config.json."
        )
    return _of_files(dict.fromkeys(paths, ()))


def _of_index(path: str) -> Inventory:
    try:
        files = weight_map(_text(path), repr(path))
    except DamagedCheckpoint as error:
        raise LaunchError(str(error)) from None
    folder = os.path.dirname(path)
    missing = [file for file in files if not os.path.isfile(os.path.join(folder, file))]
    if missing:
        raise LaunchError(
            f"{path!r} names {missing[0]}, which is not there"
            f"{f', as {len(missing) - 1} others' if len(missing) > 1 else ''}. Download all shards, or name the model's "
            "config.json."
        )
    if not all(file.endswith(SUFFIX) for file in files):
        raise LaunchError(f"{path!r} lists files that are no safetensors. Name the model's config.json instead.")
    return _of_files({os.path.join(folder, file): names for file, names in files.items()}, path)


def _of_files(files: Mapping[str, Iterable[str]], index: str = "") -> Inventory:
    """Of files and, where an index says so, the tensors that must be in them."""
    tensors: Tensors = {}
    for path, wanted in files.items():
        with _reading(path):
            found = header_of(path)
        lost = sorted(set(wanted) - found.keys())
        if lost:
            raise LaunchError(f"{index!r} says that {lost[0]!r} is in {path!r}, and it is not.")
        tensors |= found
    paths = list(files)
    source = f"the header of {paths[0]}" if len(paths) == 1 else f"the headers of {len(paths)} files"
    return _named(tensors, source, paths[0])


def _of_shards(folder: str) -> Inventory:
    with _reading(folder):
        tensors = tensors_of_shards(folder)
    return _named(tensors, f"the metadata of {folder}", folder)


def _named(tensors: Tensors, source: str, path: str) -> Inventory:
    if not tensors:
        raise LaunchError(f"{path!r} has no tensors.")
    return of_tensors({name: (entry, _bytes_of(entry, path)) for name, entry in tensors.items()}, source)


def _bytes_of(entry: TensorEntry, path: str) -> int:
    named = _BITS.fullmatch(entry.dtype.replace("BOOL", "U8"))
    if named is None:
        raise LaunchError(f"{path!r} has tensors of {entry.dtype}, whose size is not known here.")
    return math.prod(entry.shape) * int(named[1]) // 8


def _text(path: str) -> bytes:
    with _reading(path), open(path, "rb") as file:
        text = file.read(_LARGEST_JSON + 1)
    if len(text) > _LARGEST_JSON:
        raise LaunchError(f"{path!r} has more than {_LARGEST_JSON} bytes, which no configuration and no index has.")
    return text


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Tells which file it is that cannot be read, or is damaged."""
    try:
        yield
    except DamagedCheckpoint as error:
        told = str(error)
        raise LaunchError(told if path in told else f"{path!r} is damaged: {told}") from error
    except OSError as error:
        raise LaunchError(f"{path!r} cannot be read: {error.strerror or error}") from error
