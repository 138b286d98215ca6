"""Weights as Hugging Face's libraries read them: one file, or several with an index. One process writes."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelerate.checkpoint.formats import write_bytes, write_safetensors, write_torch
from accelerate.checkpoint.manifest import INDEX_SUFFIX, FileEntry
from accelerate.checkpoint.storage import LocalStorage
from accelerate.runtime.durable import Path, sync_folder


def write_weights(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    pattern: str,
    limit: int = sys.maxsize,
    aliases: Mapping[str, str] | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
) -> dict[str, FileEntry]:
    """Write weights durably into a folder that has none, in files of at most `limit` bytes or of one tensor.

    A `pattern` such as ``model{suffix}.safetensors`` names them; files of another extension are in torch's format.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=limit)
    one = pattern.format(suffix="")
    entries, where = {}, dict(split.tensor_to_filename)
    for file, names in (split.filename_to_tensors or {one: []}).items():
        path, part = os.path.join(folder, file), {name: tensors[name] for name in names}
        if one.endswith(".safetensors"):
            tied = {name: kept for name, kept in (aliases or {}).items() if kept in part}
            where.update(dict.fromkeys(tied, file))
            # Tied names stand in the metadata, where huggingface_hub looks for them.
            entries[file] = write_safetensors(path, part, {"format": "pt", **tied}, aliases=tied, read=read)
        else:
            entries[file] = write_torch(path, part)
    if split.is_sharded:
        text = json.dumps({"metadata": split.metadata, "weight_map": where}, indent=2, sort_keys=True) + "\n"
        entries[one + INDEX_SUFFIX] = write_bytes(os.path.join(folder, one + INDEX_SUFFIX), text.encode())
    return entries


def replace_weights(
    folder: Path, tensors: Mapping[str, torch.Tensor], pattern: str, limit: int = sys.maxsize, **options: Any
) -> dict[str, FileEntry]:
    """Write weights aside, and let them replace those of the same pattern; at no moment do old and new files mix.

    Several processes may write into one folder: then the weights of the last one are there.
    """
    os.makedirs(folder, exist_ok=True)  # also refuses an empty name
    here = LocalStorage(folder)
    here.sweep()
    storage = LocalStorage(os.path.join(folder, f"weights_{os.urandom(8).hex()}"))
    index_name = pattern.format(suffix="") + INDEX_SUFFIX
    stem, _, extension = pattern.partition("{suffix}")
    ours = re.compile(rf"{re.escape(stem)}(-[0-9]{{5}}-of-[0-9]{{5}})?{re.escape(extension)}")
    try:
        aside = storage.stage()
        entries = write_weights(aside, tensors, pattern, limit, **options)
        with here.entry("weights").locked():
            if index_name in entries:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, index_name))  # without it the shards are no model
            for name in entries:  # the index is the last one
                os.replace(os.path.join(aside, name), os.path.join(folder, name))
            # Of an earlier save with another number of shards.
            for entry in sorted(os.listdir(folder), key=lambda name: name != index_name):
                if entry not in entries and (ours.fullmatch(entry) or entry == index_name):
                    os.remove(os.path.join(folder, entry))
            sync_folder(os.fspath(folder))
    finally:
        storage.discard()
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # if a failure leaves it empty
    return entries
