"""The collectives of a piece of code on a rank, with group, count and bytes, on any backend, also torch's fake one."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate.extensions.reports.torch_private import group_named, is_distributed
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import pytree

EVERYONE = "all ranks"
# By what their operators are called in torch.ops.c10d and torch.ops._c10d_functional; the first that fits.
_KINDS = {
    "all_reduce": "all_?reduce",
    "all_gather": "all_?gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_?to_?all",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce_",
    "send": "i?send",
    "recv": "i?recv",
    "barrier": "(monitored_)?barrier",
}
_HOMES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass(frozen=True, order=True)
class Collective:
    """All calls of one kind of collective by one group.

    Attributes:
        group: the dimension of the mesh, "all ranks", or how many ranks.
        kind: such as "all_gather".
        count: how many calls.
        bytes: for each call the larger of its input and its output on this rank; for an all-gather the full tensor.
    """

    group: str
    kind: str
    count: int
    bytes: int


class CollectiveRecorder(torch_private.TorchDispatchMode):
    """A context in which each collective of this thread, and of backward passes that it starts, is counted.

    It does not distinguish ranks that share a mesh. So the count of a rank in a run with `gloo` or `nccl` equals the count of
    the same rank on torch's fake process group.

    Not a collective.

    Example:
        >>> with CollectiveRecorder() as recorder:
        ...     _ = torch.ones(2) + 1
        >>> recorder.take()
        []
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._labels: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def name(self, mesh: Any | None) -> None:
        """Name groups by the dimensions of a mesh, also by flattened dimensions."""
        self._labels.update(groups_of(mesh))

    def take(self) -> list[Collective]:
        """Return the counts since the last call, in the order of groups and kinds."""
        collectives = [
            Collective(self._label(group), kind, count, self._bytes[group, kind])
            for (group, kind), count in self._calls.items()
        ]
        self._calls.clear()
        self._bytes.clear()
        return sorted(collectives)

    def extents(self) -> dict[str, tuple[int, int]]:
        """Return by group its number of ranks, and the number of ranks between neighbours."""
        extents = {}
        for group in self._sizes:
            first, *others = dist.get_process_group_ranks(group_named(group))
            extents[self._label(group)] = (1 + len(others), others[0] - first if others else 1)
        return extents

    def _label(self, group: str) -> str:
        if dist.is_initialized() and group == dist.group.WORLD.group_name:
            return self._labels.get(group, EVERYONE)
        return self._labels.get(group, f"{self._sizes[group]} ranks")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operators on DTensors are dispatched again as operators on local parts, exchanges included.
        if any(is_distributed(kind) for kind in types):
            return NotImplemented
        result = self.run_operator(func, args, kwargs or {})
        if (collective := collective_of(func, args, result)) is None:
            return self.seen(func, args, result)
        kind, sent = collective
        group, size = _group(args)
        self._sizes[group] = size
        self._calls[group, kind] += 1
        self._bytes[group, kind] += sent
        return self.exchanged(func, args, result)

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; for subclasses."""
        return func(*args, **kwargs)

    def seen(self, func: Any, args: Any, result: Any) -> Any:
        """Take note of an operator that is no collective, and return its result; for subclasses."""
        return result

    def exchanged(self, func: Any, args: Any, result: Any) -> Any:
        """Take note of a collective, and return its result; for subclasses."""
        return result


def groups_of(mesh: Any | None) -> dict[str, str]:
    """Return the dimension of a mesh, as it is called, by the name of its process group."""
    labels: dict[str, str] = {}
    for name in (*(mesh.mesh_dim_names or ()), "dp_shard_cp", "dp_cp", "dp") if mesh is not None else ():
        part = torch_private.dimension(mesh, name)
        if part is not None and part.ndim == 1:
            labels.setdefault(part.get_group().group_name, name)
    return labels


def collective_of(func: Any, args: Any, result: Any) -> tuple[str, int] | None:
    """Return the kind and the bytes of an operator's call, as in `Collective`; None if it is no collective."""
    if getattr(func, "namespace", "") not in _HOMES:
        return None
    name = func.__name__.partition(".")[0].lstrip("_")
    kind = next((kind for kind, pattern in _KINDS.items() if re.match(pattern, name)), None)
    return None if kind is None else (kind, 0 if kind == "barrier" else max(map(_size, (*args, result))))


def _group(args: Any) -> tuple[str, int]:
    """Return the name and size of the group among the arguments of an operator: an object of torch's, or its name."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(value)
            except RuntimeError:  # the operation of a reduction
                continue
            return group.group_name, group.size()
    name = [value for value in args if isinstance(value, str)][-1]
    return name, group_named(name).size()


def _size(value: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
