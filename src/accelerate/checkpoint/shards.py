"""Torch's distributed checkpoint format (DCP), written by torch's planner into durable files.

A folder has ``.distcp`` files, which hold pieces of tensors, and ``.metadata``, a pickle that says which piece lies where. This module
imports torch's planner, so others import it when they need it. `checkpoint.reader` reads.

Source:
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import contextlib
import copy
import math
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

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


@dataclass
class _Plans:
    """What the ranks of a process group planned when they last saved a folder; each rank has its own, the coordinator all of them."""

    own: dcp.SavePlan | None = None
    final: dcp.SavePlan | None = None
    every: list[dcp.SavePlan] = field(default_factory=list)
    metadata: Metadata | None = None


# Weak: gloo closes its connections with the last reference to a process group.
_planned: "weakref.WeakKeyDictionary[Any, dict[str, _Plans]]" = weakref.WeakKeyDictionary()

# Stands for a plan that has not changed.
_AS_BEFORE = dcp.SavePlan([], planner_data="as before")


class _SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner; plans are kept, and made again when they change, and placeholders are read when they are written.

    Torch can keep plans as well, but takes those of another dtype for the same.
    """

    def __init__(self, stored: CheckpointReader | None, plans: _Plans) -> None:
        super().__init__()
        self._stored, self._plans = stored, plans

    def create_local_plan(self) -> dcp.SavePlan:
        self._own = super().create_local_plan()
        return _AS_BEFORE if self._own == self._plans.own else self._own

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        kept = self._plans
        if any(plan != _AS_BEFORE for plan in all_plans):
            pairs = zip(all_plans, kept.every or [None] * len(all_plans), strict=True)
            every = [before if plan == _AS_BEFORE else plan for plan, before in pairs]
            all_plans, metadata = super().create_global_plan(_shared_out(every))
            kept.every, kept.metadata = every, metadata
        return all_plans, copy.copy(kept.metadata)  # which gets the places of this save

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        if new_plan.planner_data != _AS_BEFORE.planner_data:  # the writer has put its name for files into it
            self._plans.own, self._plans.final = self._own, new_plan
        return super().finish_plan(self._plans.final)

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        if isinstance(found, _Kept):
            found = found.value
        return found if self._stored is None else self._stored.read(found)


def _shared_out(plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
    """Let one rank write each item: of what ranks have whole the first one, of a shard the one with the fewest bytes so far.

    Replicas have the same shards. What is whole may differ between ranks, as running statistics do.
    """
    found: dict[MetadataIndex, tuple[Any, int, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.index not in found:
                data = item.tensor_data
                size = 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
                found[item.index] = item, size, []
            found[item.index][2].append(rank)
    load, writers = [0] * len(plans), {}
    for item, size, ranks in sorted(found.values(), key=lambda one: -one[1]):
        whole = item.tensor_data is None or item.tensor_data.chunk.sizes == item.tensor_data.size
        writers[item.index] = writer = ranks[0] if whole else min(ranks, key=load.__getitem__)
        load[writer] += size
    # The smallest first: what is small and whole, which every rank reads, lies together in few pieces of the file.
    return [
        replace(plan, items=sorted(mine, key=lambda item: found[item.index][1]))
        for rank, plan in enumerate(plans)
        for mine in [[item for item in plan.items if writers[item.index] == rank]]
    ]


def _writer(
    folder: durable.Path, rank: int, entries: dict[str, FileEntry], files: int, create: formats.Create
) -> dcp.FileSystemWriter:
    """Return torch's writer, whose files are hashed on their way and whole when they are closed; `entries` gets what they are."""

    class CreatedFiles(FileSystem):
        """The file system of torch's writer; a file takes its place when it is whole, so that torch need not rename it."""

        @contextlib.contextmanager
        def create_stream(self, path: durable.Path, mode: str) -> Iterator[Any]:
            path = os.fspath(path).removesuffix(".tmp")  # of the metadata
            with create(path) as file:
                yield file
            entries[os.path.basename(path)] = FileEntry.of(file, rank)

        def exists(self, path: durable.Path) -> bool:
            return False

        def rename(self, *paths: durable.Path) -> None:
            return

    # No sync by the writer: what CreatedFiles creates syncs when it is closed.
    made = dcp.FileSystemWriter(folder, sync_files=False, thread_count=files)
    made.fs = CreatedFiles()
    return made


def save(
    state: dict[str, Any],
    folder: durable.Path,
    group: "dist.ProcessGroup | None" = None,
    stored: CheckpointReader | None = None,
    files: int = 1,
    create: formats.Create = durable.durable,
) -> dict[str, FileEntry]:
    """Write a state in torch's sharded format: each rank the shards it has, and its part of what all have. All ranks.

    Args:
        state: nested dictionaries of tensors, DTensors, ShardedTensors and plain values.
        folder: where to; all ranks see the same. What it had is replaced.
        group: the ranks that save, and how they talk; the default group by default.
        stored: reads the placeholders in the state, one at a time; then one process writes alone.
        files: how many files a rank writes.
        create: gives the file of a path in the folder to write to.

    Returns:
        What the manifest says of the files that this rank wrote, by their name in the folder.

    Raises:
        RuntimeError: writing failed on some rank; raised on all of them.
    """
    alone = stored is not None or not (dist.is_available() and dist.is_initialized())
    rank = 0 if alone else dist.get_rank(group)
    entries: dict[str, FileEntry] = {}
    kept = {} if alone else _planned.setdefault(group or dist.group.WORLD, {})
    plans = kept.setdefault(os.path.basename(folder), _Plans())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            dcp.save(
                _keeping(formats.plain(state)),
                storage_writer=_writer(folder, rank, entries, files, create),
                planner=_SavePlanner(stored, plans),
                process_group=group,
                no_dist=alone,
            )
        except BaseException as error:
            kept.clear()  # ranks may have come to different steps
            if not isinstance(error, dcp.CheckpointException):
                raise
            failures = "; ".join(f"rank {number}: {cause!r}" for number, (cause, _) in sorted(error.failures.items()))
            raise RuntimeError(f"{os.fspath(folder)} could not be written. {failures}") from error
    return entries
