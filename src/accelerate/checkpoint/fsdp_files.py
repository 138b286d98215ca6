"""Files of models and optimizers that are spread over ranks: their names, writing them, and finding them in any layout.

On disk a model and its optimizer have one of three layouts, each as upstream has it:

- sharded: the folders ``pytorch_model_fsdp_0`` and ``optimizer_0`` in the format of torch's distributed checkpoint. Each rank
  writes and reads its own part.
- full: ``pytorch_model_fsdp.bin`` and ``optimizer.bin``. Parameters are gathered one at a time into the memory of rank 0. What
  other strategies write, ``model.safetensors`` and an optimizer that numbers its parameters, is read as well.
- local: a file per rank, ``pytorch_model_fsdp_rank0.bin``, that only the same number of ranks in the same layout can load.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from accelerate.checkpoint import dcp, formats, fsdp_state
from accelerate.checkpoint.dcp import Steps
from accelerate.checkpoint.fsdp_state import Layout, on_all, together
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, damaged, is_inside, problems
from accelerate.checkpoint.names import METADATA, model_file, optimizer_file
from accelerate.checkpoint.plan import SavePlan
from accelerate.checkpoint.readers import FilesReader, FolderReader, Reader
from accelerate.checkpoint.storage import LocalStorage
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

Path = str | os.PathLike[str]
Kind = Literal["model", "optimizer"]
Entries = dict[str, FileEntry]

# Which parameter each number in an optimizer's file means: names by position, for each group. Torch's format does not tell.
NAMES_FILE = "parameter_names.json"


# -- names of files ----------------------------------------------------------------------------------------------------


def model_folder(index: int) -> str:
    """Return the name of the folder with a model's shards."""
    return f"{FSDP_MODEL_NAME}_{index}"


def optimizer_folder(index: int) -> str:
    """Return the name of the folder with the shards of an optimizer's state."""
    return f"{OPTIMIZER_NAME}_{index}"


def full_model_file(index: int) -> str:
    """Return the name of the file with all weights of a model that was sharded."""
    return f"{FSDP_MODEL_NAME}.bin" if index == 0 else f"{FSDP_MODEL_NAME}_{index}.bin"


def rank_file(stem: str, rank: int) -> str:
    """Return the name of the file with what one rank has of a model or optimizer.

    Args:
        stem: the name of the object it belongs to.
        rank: whose it is.
    """
    return f"{stem}_rank{rank}.bin"


def local_model_stem(index: int, flat: bool) -> str:
    """Return the start of the names of the ranks' files of a model.

    Args:
        index: which of the models it is.
        flat: it holds FSDP1's flat parameters (LOCAL_STATE_DICT), not shards of the original ones.
    """
    return FSDP_MODEL_NAME if flat and index == 0 else model_folder(index)


# -- writing -----------------------------------------------------------------------------------------------------------


def write(
    state: dict[str, Any],
    folder: Path,
    kind: Kind,
    index: int = 0,
    layout: Layout = "sharded",
    *,
    flat: bool = False,
) -> None:
    """Write what `model_state` or `optimizer_state` returned, or put it into a plan. All ranks.

    Args:
        state: the state.
        folder: the checkpoint's folder, which all ranks see, or the `SavePlan` of a save.
        kind: what it is the state of.
        index: which of the models or optimizers it is, from 0.
        layout: how it is written.
        flat: for ``"local"``, that it holds FSDP1's flat parameters.

    Raises:
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    rank, size = fsdp_state.rank_and_size()
    if layout == "sharded":
        name = model_folder(index) if kind == "model" else optimizer_folder(index)
        if isinstance(folder, SavePlan):
            folder.add_shards(name, {kind: state})
        else:
            _publish_shards({kind: state}, os.fspath(folder), name)
        return
    if layout == "full":
        with fsdp_state.quietly():
            state = fsdp_state.gathered(state)
        name, owns = full_model_file(index) if kind == "model" else optimizer_file(index), rank == 0
    else:
        stem = local_model_stem(index, flat) if kind == "model" else optimizer_folder(index)
        state, name, owns = _parts(state), rank_file(stem, rank), True
    if isinstance(folder, SavePlan):
        if owns:
            folder.add_object(name, state)
        return
    path = os.path.join(folder, name)
    entries = together(lambda: {name: formats.write_torch(path, state, rank)} if owns else {})

    def clear() -> list[str]:
        pattern = re.compile(re.escape(stem) + r"_rank(\d+)\.bin")
        found = [file for file in os.listdir(folder) if (match := pattern.fullmatch(file)) and int(match[1]) >= size]
        for file in found:  # of a save on more ranks
            os.unlink(os.path.join(folder, file))
        return found

    stale = together(lambda: clear() if layout == "local" and rank == 0 else [])
    _list_anew(os.fspath(folder), entries, stale)


def _publish_shards(state: dict[str, Any], folder: str, name: str) -> None:
    """Write shards aside, and let them take their place together."""
    rank = fsdp_state.rank_and_size()[0]
    place = LocalStorage(os.path.join(folder, name))
    staged = on_all(together(lambda: place.stage() if rank == 0 else ""))[0]
    try:
        written = dcp.save(state, staged, None, fsdp_state.is_spread)
        together(lambda: place.publish() if rank == 0 else None)
    except BaseException:
        place.abandon()
        raise
    _list_anew(folder, {f"{name}/{file}": entry for file, entry in written.items()}, [f"{name}/"])


def _list_anew(folder: str, entries: dict[str, FileEntry], replaced: Sequence[str]) -> None:
    """Let the manifest of a checkpoint, if it lists what was replaced, list what replaced it. All ranks.

    Args:
        folder: the checkpoint's folder.
        entries: of the files that this rank wrote.
        replaced: names, or beginnings of names, that are not there any more.
    """
    written = [entry for of_rank in on_all(entries) for entry in of_rank.items()]

    def tell() -> None:
        if fsdp_state.rank_and_size()[0] or not os.path.isfile(os.path.join(folder, NAME)):
            return
        with contextlib.suppress(DamagedCheckpoint):  # nobody loads by it
            manifest = Manifest.read(folder)
            kept = {file: entry for file, entry in manifest.files.items() if not file.startswith(tuple(replaced))}
            if len(kept) < len(manifest.files) or any(file in kept for file, _ in written):
                dataclasses.replace(manifest, files={**kept, **dict(written)}).write(folder)

    together(tell)


def _parts(state: Any) -> Any:
    """Return a state in which ShardedTensors, which are not plain data, are replaced by what this rank has of them."""
    if isinstance(state, Mapping):
        return {name: _parts(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_parts(value) for value in state]
    if not isinstance(state, torch.Tensor):
        return state
    return fsdp_state.part(state).cpu() if fsdp_state.is_sharded_tensor(state) else state.detach()


# -- finding -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Where a model or optimizer lies in a checkpoint.

    Attributes:
        folder: the checkpoint's folder.
        name: of the file or folder in it; for a local layout the start of the names of the ranks' files.
        layout: how it was written.
        index: which of the models or optimizers it is.
    """

    folder: str
    name: str
    layout: Layout
    index: int = 0

    def reader(self) -> Reader:
        """Return what reads it, unless the layout is local. Any rank, alone.

        Raises:
            DamagedCheckpoint: it is not what its name says.
        """
        path = os.path.join(self.folder, self.name)
        if self.layout == "sharded":
            return FolderReader(path)
        files = indexed_files(path) if path.endswith(".index.json") else [self.name]
        return FilesReader([os.path.join(self.folder, file) for file in files], aliases(self.folder, files))

    def of_rank(self) -> Any:
        """Return what this rank wrote, for a local layout. Any rank, alone.

        Raises:
            RuntimeError: another number of ranks wrote it.
        """
        rank, size = fsdp_state.rank_and_size()
        written = sum(self.has(entry) for entry in os.listdir(self.folder))
        if written != size:
            raise RuntimeError(
                f"{self.name}_rank*.bin in {self.folder!r} were written by {written} ranks, and only as many can load them; "
                f"there are {size}. Save with SHARDED_STATE_DICT and use_dcp=True to load on any number of ranks."
            )
        return formats.mapped(os.path.join(self.folder, rank_file(self.name, rank)))

    def has(self, file: str) -> bool:
        """Say whether a file belongs to it, beside those that an index lists.

        Args:
            file: its path in the checkpoint's folder.
        """
        if self.layout == "local":
            return re.fullmatch(re.escape(self.name) + r"_rank\d+\.bin", file) is not None
        return file == self.name or (self.layout == "sharded" and file.startswith(f"{self.name}/"))

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Compare its files with what a manifest says of them, if there is one. Any rank, alone.

        Args:
            rank: of those that share the work, which all see the folder.
            size: how many they are.

        Raises:
            DamagedCheckpoint: a file is missing, or has changed; the message lists them.
        """
        if not os.path.isfile(os.path.join(self.folder, NAME)):
            return
        manifest = Manifest.read(self.folder)
        path, inside = os.path.join(self.folder, self.name), {NAMES_FILE}
        if path.endswith(".index.json"):
            inside.update(indexed_files(path))
        files = [file for file in manifest.files if self.has(file) or file in inside]
        files = sorted(files, key=lambda file: (-manifest.files[file].size, file))[rank::size]
        lines = problems(self.folder, manifest, deep=True, only=set(files).__contains__)
        if lines:
            raise damaged(self.folder, lines)


def find(folder: Path, kind: Kind, index: int = 0, prefer: Layout | None = None) -> Found | None:
    """Return where a model or optimizer lies in a checkpoint, in whatever layout; None if it is not there. Any rank, alone.

    Args:
        folder: the checkpoint's folder.
        kind: what is looked for.
        index: which of the models or optimizers it is.
        prefer: the layout to take if there are several.
    """
    folder = os.fspath(folder)
    if kind == "model":
        safe = model_file(index)
        files = [full_model_file(index), safe, f"{safe}.index.json", model_file(index, safe_serialization=False)]
        shards, stems = model_folder(index), [model_folder(index), FSDP_MODEL_NAME][: 1 if index else 2]
    else:
        files, shards, stems = [optimizer_file(index)], optimizer_folder(index), [optimizer_folder(index)]
    whole = os.path.basename(
        LocalStorage(os.path.join(folder, shards)).fetch()
    )  # what a killed save has put aside counts
    found = [Found(folder, whole, "sharded", index)] if os.path.isfile(os.path.join(folder, whole, METADATA)) else []
    found += [Found(folder, file, "full", index) for file in files if os.path.isfile(os.path.join(folder, file))]
    found += [
        Found(folder, stem, "local", index)
        for stem in stems
        if os.path.isfile(os.path.join(folder, rank_file(stem, 0)))
    ]
    return min(found, key=lambda one: one.layout != prefer, default=None)


def required(folder: Path, kind: Kind, index: int, prefer: Layout | None) -> Found:
    """Return what `find` returns, verified; raise if there is nothing. All ranks.

    Args:
        folder: the checkpoint's folder, which all ranks see.
        kind: what is looked for.
        index: which of the models or optimizers it is.
        prefer: the layout to take if there are several.

    Raises:
        FileNotFoundError: there is nothing; the message tells what was looked for.
        DamagedCheckpoint: a file is not what the checkpoint's manifest says of it.
        RuntimeError: another rank failed.
    """
    rank, size = fsdp_state.rank_and_size()
    found = together(lambda: _required(folder, kind, index, prefer))
    together(lambda: found.verify(rank, size))
    return found


def _required(folder: Path, kind: Kind, index: int, prefer: Layout | None) -> Found:
    found = find(folder, kind, index, prefer)
    if found is None:
        here = model_folder(index) if kind == "model" else optimizer_folder(index)
        file = full_model_file(index) if kind == "model" else optimizer_file(index)
        raise FileNotFoundError(
            f"{os.fspath(folder)!r} has no {kind} {index}: neither {here} nor {file} is there. Load the folder of a "
            "checkpoint, with the models and optimizers in the order in which they were saved."
        )
    return found


def indexed_files(path: Path, present: Container[str] | None = None) -> list[str]:
    """Return the files that an index of safetensors lists. Any rank, alone.

    Args:
        path: the index.
        present: the files there are, where they do not lie beside it.

    Raises:
        DamagedCheckpoint: it is no index, or one of its files is missing.
    """
    try:
        with open(path, encoding="utf-8") as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{os.fspath(path)} is no index of files with weights: {error!r}") from None
    for file in files:
        there = file in present if present is not None else os.path.isfile(os.path.join(os.path.dirname(path), file))
        if not is_inside(file) or not there:
            raise DamagedCheckpoint(f"{os.fspath(path)} lists {file!r}, which is missing.")
    return files


def aliases(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Return the names that a checkpoint's manifest tells of tensors which are in files under another one.

    Args:
        folder: the checkpoint's folder; it may have no manifest.
        files: the files.
    """
    if not os.path.isfile(os.path.join(folder, NAME)):
        return {}
    entries = Manifest.read(folder).files
    return {alias: name for file in files if file in entries for alias, name in entries[file].aliases.items()}


# -- names of parameters -----------------------------------------------------------------------------------------------


def names_text(names: Mapping[int, Sequence[Sequence[str]]]) -> bytes:
    """Return the content of the file that tells which parameters the numbers in optimizers' files mean.

    Args:
        names: `fsdp_state.parameter_names` by the index of the optimizer.
    """
    text = json.dumps({str(index): [list(group) for group in groups] for index, groups in names.items()}, indent=1)
    return text.encode() + b"\n"


def write_names(names: Mapping[int, Sequence[Sequence[str]]], folder: Path, rank: int = 0) -> Entries:
    """Write which parameters the numbers in optimizers' files mean. One process per folder.

    Args:
        names: `fsdp_state.parameter_names` by the index of the optimizer.
        folder: the checkpoint's folder.
        rank: who writes.
    """
    return {NAMES_FILE: formats.write_bytes(os.path.join(folder, NAMES_FILE), names_text(names), rank)}


def read_names(folder: Path, index: int = 0) -> list[list[str]] | None:
    """Return the names of an optimizer's parameters that a checkpoint tells, or None. Any rank, alone.

    Args:
        folder: the checkpoint's folder.
        index: which of the optimizers it is.

    Raises:
        DamagedCheckpoint: the file of names is damaged.
    """
    path = os.path.join(folder, NAMES_FILE)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            groups = json.load(file).get(str(index))
    except (ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} does not hold names: {error}") from None
    if groups is not None and not (isinstance(groups, list) and all(map(_is_names, groups))):
        raise DamagedCheckpoint(f"{path} does not hold names for optimizer {index}.")
    return groups


def _is_names(group: Any) -> bool:
    return isinstance(group, list) and all(isinstance(name, str) for name in group)


# -- whole models ------------------------------------------------------------------------------------------------------


def model_specs(reader: Reader) -> dict[str, dict[Steps, str]]:
    """Return the names of a stored model's values, and of each the keys in the reader's metadata.

    A value has one key, without steps to it; but an extra state, which may be nested, has one for each value in it.

    Args:
        reader: of a model's files.
    """
    specs = list(reader.specs())
    # What we and upstream write lies under "model"; what others write may lie under another name, or under none.
    tops = {steps[0] for steps, _ in specs if steps}
    inside = len(tops) == 1 and all(len(steps) > 1 for steps, _ in specs) and not is_extra(str(*tops))
    found: dict[str, dict[Steps, str]] = {}
    for steps, key in specs:
        steps = steps[1:] if inside else steps
        end = next((number for number, step in enumerate(steps, 1) if is_extra(str(step))), len(steps))
        found.setdefault(".".join(map(str, steps[:end])), {})[steps[end:]] = key
    return found


def is_extra(name: str) -> bool:
    """Say whether a name is that of a module's extra state, which may be anything.

    Args:
        name: of a value in a model's state.
    """
    return name.rpartition(".")[2] == nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def merged_model(reader: Reader) -> dict[str, Any]:
    """Return a stored model's values, whole and in memory. Any rank, alone.

    Args:
        reader: of a model's files.

    Raises:
        DamagedCheckpoint: a file is damaged.
    """
    specs = model_specs(reader)
    filled = reader.whole(key for keys in specs.values() for key in keys.values())
    return {
        name: dcp.nested({steps: filled[key] for steps, key in keys.items()}, reader.origin)
        for name, keys in specs.items()
    }
