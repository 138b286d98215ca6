"""Communication through `torch.distributed`."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.comm.base import Communicator, checksum
from accelerate.runtime import torch_private

OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HOST_BACKENDS = ("gloo", "mpi")
# The name changed in torch 2.13; the old one warns there.
_gather_bytes = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCommunicator(Communicator):
    """The communicator of the default process group. torch does not check whether the ranks do the same."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        pairs = str(dist.get_backend_config()).split(",")
        self._backends = dict(pair.split(":", 1) for pair in pairs if ":" in pair)

    def _transport(self, tensors: Sequence[torch.Tensor]) -> torch.device:
        """Return the device over which tensors travel; host backends take the way over host memory."""
        if not tensors:
            return self._default_device()
        kind = tensors[0].device.type
        if self._backends.get(kind, "gloo") not in _HOST_BACKENDS:
            return device_of(kind)
        return device_of("cpu") if "cpu" in self._backends else self._default_device()

    def _default_device(self) -> torch.device:
        on_host = not self._backends or any(backend in _HOST_BACKENDS for backend in self._backends.values())
        return device_of("cpu" if on_host else next(iter(self._backends)))

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a contiguous tensor; as bytes, for not every backend knows every dtype, and to a gather they are the same."""
        output = tensor.new_empty((self.world_size * tensor.shape[0], *tensor.shape[1:]))
        _gather_bytes(as_bytes(output), as_bytes(tensor), group=self.group)
        return output

    def _carry_out(
        self, argument: str | int | None, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """Do one operation with each tensor, over a device."""
        if argument is None:
            return [self._gather(tensor.to(device).contiguous()) for tensor in tensors]
        results = [tensor.to(device, copy=True).contiguous() for tensor in tensors]
        for result in results:
            if isinstance(argument, str):
                dist.all_reduce(result, OPS[argument], group=self.group)
            else:
                dist.broadcast(as_bytes(result), argument, group=self.group)
        return results

    def _exchange(
        self, operation: str, argument: str | int | None, structure: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Do one operation with all tensors, and return the results on their devices."""
        results = self._carry_out(argument, dense(tensors), self._transport(tensors))
        return [result.to(tensor.device) for result, tensor in zip(results, tensors, strict=True)]

    def is_same(self, value: Any) -> bool:
        """Return whether all ranks pass values with the same `repr`, by one all-reduce."""
        return same_on_all(value, self._default_device(), self.group)

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object."""
        objects = [None] * self.world_size
        dist.all_gather_object(objects, obj, group=self.group)
        return objects

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements by those of rank `src`."""
        dist.broadcast_object_list(objects, src=src, group=self.group, device=self._default_device())
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        device = self._default_device()
        if device.type == "cpu":
            dist.barrier(group=self.group)
        else:  # without the index, NCCL guesses the device from the rank
            dist.barrier(group=self.group, device_ids=[device.index])


def dense(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors whose memory has their values; TypeError for layouts that cannot be exchanged."""
    for tensor in tensors:
        if tensor.is_nested:
            raise TypeError(
                f"Cannot exchange a nested tensor of layout {tensor.layout}; convert it with `to_padded_tensor(0.0)`."
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"Cannot exchange a tensor of layout {tensor.layout}; convert it with `to_dense()`.")
    return [tensor.resolve_conj().resolve_neg() for tensor in tensors]


def device_of(kind: str) -> torch.device:
    """Return the current device of a kind."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor's memory."""
    return tensor.view(-1).view(torch.uint8)


def same_on_all(value: Any, device: torch.device | str, group: Any = None) -> bool:
    """Return whether all ranks of a group pass values with the same `repr`, by one all-reduce on a device.

    Collective: call on every rank of the group.
    """
    number = checksum(value)
    words = torch.tensor([number, ~number], device=device)
    dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
    highest, lowest = words.tolist()
    return highest == ~lowest


def operations_started() -> dict[str, int]:
    """Return how many operations this rank has started in each of its process groups; groups that do not count are skipped."""
    counts: dict[str, int] = {}
    for group in torch_private.groups():
        try:
            # Groups that `split_group` makes have one name and different ranks.
            members = zlib.crc32(repr(dist.get_process_group_ranks(group)).encode())
            for backend in torch_private.backends(group):
                key = f"{backend.name()}:{group.group_name}:{members:x}"
                counts[key] = torch_private.collectives_started(backend)
        except Exception:  # no backend counts by contract, and a group may be destroyed while we ask
            continue
    return counts
