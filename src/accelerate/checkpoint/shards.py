"""Torch's distributed checkpoint format (DCP), written by torch's planner into durable files.

A folder has ``.distcp`` files, which hold pieces of tensors, and ``.metadata``, a pickle that says which piece lies where. This module
imports torch's planner, so others import it when they need it. `checkpoint.reader` reads.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import FileEntry
from accelerate.checkpoint.reader import CheckpointReader
from accelerate.checkpoint.state import is_spread, mapped_leaves
from accelerate.runtime import durable


class _Kept:
    """A dictionary that torch would lose or change: an empty one, and one with keys that are no texts."""

    def __init__(self, value: Mapping[Any, Any]) -> None:
        self.value = value


def _keeping(state: Any, path: str = "") -> Any:
    """Return a state in which such dictionaries are single values."""
    if isinstance(state, list):
        return [_keeping(value, f"{path}.{number}") for number, value in enumerate(state)]
    if not isinstance(state, Mapping):
        return state
    outer = path.count(".") < 2  # what has all weights or states, of which there may be none
    if (state or outer) and all(isinstance(key, str) for key in state):
        return {key: _keeping(value, f"{path}.{key}" if path else key) for key, value in state.items()}

    def refuse_shards(value: Any) -> None:
        if is_spread(value):
            raise ValueError(
                f"{path} has shards of a tensor below a key that is no text, which the sharded format cannot hold. Save with "
                "FULL_STATE_DICT, or use texts as keys."
            )

    mapped_leaves(state, refuse_shards)
    return _Kept(state)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner; what ranks have whole is written as the first one has it, and placeholders are read when they are written."""

    def __init__(self, stored: CheckpointReader | None) -> None:
        # By default the rank with the least to write writes it; running statistics, say, differ between ranks.
        super().__init__(dedup_save_to_lowest_rank=True)
        self._stored = stored

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        if isinstance(found, _Kept):
            found = found.value
        return found if self._stored is None else self._stored.read(found)


def _writer(folder: durable.Path, rank: int, entries: dict[str, FileEntry], files: int) -> dcp.FileSystemWriter:
    """Return torch's writer, whose files are hashed on their way and on the disk when they are closed; `entries` gets what they are."""

    class DurableFiles(FileSystem):
        """The file system of torch's writer."""

        @contextlib.contextmanager
        def create_stream(self, path: durable.Path, mode: str) -> Iterator[Any]:
            with durable.durable(path) as file:
                yield file
            # The metadata is written aside, and renamed.
            entries[os.path.basename(path).removesuffix(".tmp")] = FileEntry.of(file, rank)

    made = dcp.FileSystemWriter(folder, sync_files=False, thread_count=files)  # a durable file syncs when it is closed
    made.fs = DurableFiles()
    return made


def save(
    state: dict[str, Any],
    folder: durable.Path,
    group: "dist.ProcessGroup | None" = None,
    stored: CheckpointReader | None = None,
    files: int = 1,
) -> dict[str, FileEntry]:
    """Write a state in torch's sharded format: each rank the shards it has, and its part of what all have. All ranks.

    Args:
        state: nested dictionaries of tensors, DTensors, ShardedTensors and plain values.
        folder: where to; all ranks see the same. What it had is replaced.
        group: the ranks that save, and how they talk; the default group by default.
        stored: reads the placeholders in the state, one at a time; then one process writes alone.
        files: how many files a rank writes.

    Returns:
        What the manifest says of the files that this rank wrote, by their name in the folder.

    Raises:
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    alone = stored is not None or not (dist.is_available() and dist.is_initialized())
    rank = 0 if alone else dist.get_rank(group)
    entries: dict[str, FileEntry] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(torch.distributed is|Detected an existing checkpoint)")
        try:
            dcp.save(
                _keeping(formats.plain(state)),
                storage_writer=_writer(folder, rank, entries, files),
                planner=_SavePlanner(stored),
                process_group=group,
                no_dist=alone,
            )
        except dcp.CheckpointException as error:
            failures = "; ".join(f"rank {number}: {cause!r}" for number, (cause, _) in sorted(error.failures.items()))
            raise RuntimeError(f"{os.fspath(folder)} could not be written. {failures}") from error
    return entries
