"""Weights alone in a folder, as Hugging Face's libraries read them: one file, or several with an index. One process."""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import INDEX_SUFFIX, FileEntry
from accelerate.runtime.durable import STAGING_PREFIX, Path, sync_folder


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    pattern: str,
    limit: float = math.inf,
    aliases: Mapping[str, str] | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
) -> dict[str, FileEntry]:
    """Write weights durably into a folder that has none; return what was written.

    Args:
        folder: where to.
        tensors: by name.
        pattern: of the names of files, such as ``model{suffix}.safetensors``; those of another extension are in torch's format.
        limit: the largest size of a file; a larger tensor has a file for itself. One file by default.
        aliases: as `formats.write_safetensors` takes them.
        read: as `formats.write_safetensors` takes it.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=limit)
    one = pattern.format(suffix="")
    entries, where = {}, dict(split.tensor_to_filename)
    for file, names in (split.filename_to_tensors or {one: []}).items():
        path, part = os.path.join(folder, file), {name: tensors[name] for name in names}
        if one.endswith(".safetensors"):
            tied = {name: kept for name, kept in (aliases or {}).items() if kept in part}
            where.update(dict.fromkeys(tied, file))
            # Tied names stand in the metadata, where huggingface_hub looks for them.
            entries[file] = formats.write_safetensors(path, part, {"format": "pt", **tied}, aliases=tied, read=read)
        else:
            entries[file] = formats.write_torch(path, part)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        entries[one + INDEX_SUFFIX] = formats.write_bytes(os.path.join(folder, one + INDEX_SUFFIX), text.encode())
    return entries


def replace(
    folder: Path, tensors: Mapping[str, torch.Tensor], pattern: str, limit: float, **options: Any
) -> dict[str, FileEntry]:
    """Write weights aside, and let them take the place of those of the same pattern; other files stay.

    At no moment are old files and new ones taken for one model.

    Args:
        folder: where to; it is made if missing.
        tensors: as `write` takes them.
        pattern: as `write` takes it.
        limit: as `write` takes it.
        **options: of `write`.
    """
    aside = os.path.join(folder, f"{STAGING_PREFIX}model")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    os.makedirs(aside)
    index_name = pattern.format(suffix="") + INDEX_SUFFIX
    try:
        entries = write(aside, tensors, pattern, limit, **options)
        index = os.path.join(folder, index_name)
        if index_name in entries and os.path.exists(index):
            os.unlink(index)  # without it the shards are no model
        for name in entries:  # the index is the last one
            os.replace(os.path.join(aside, name), os.path.join(folder, name))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # if a failure leaves it empty
    # Of an earlier save with another number of shards.
    stem, _, extension = pattern.partition("{suffix}")
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(extension)}")
    for entry in sorted(os.listdir(folder), key=lambda name: name != index_name):
        if entry not in entries and (ours.fullmatch(entry) or entry == index_name):
            os.remove(os.path.join(folder, entry))
    sync_folder(os.fspath(folder))
    return entries
