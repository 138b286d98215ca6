"""Communication through `torch.distributed`."""

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.comm.base import Communicator, check_reduction, mean_of
from accelerate.comm.envelope import HEADER, OPERATIONS, SMALLEST, WORDS, Post, differing

# Up to this many bytes over all ranks, gathering everything and reducing locally is one round trip where a ring needs two.
_LOCAL_WORK = 256 << 10

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HOST_BACKENDS = ("gloo", "mpi")
# The name changed in torch 2.13; the old one warns there.
_gather_bytes = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCommunicator(Communicator):
    """The communicator of the default process group.

    Operations of this class check, on every call, that the ranks agree about them; see `comm.envelope`.

    Args:
        group: the default process group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        pairs = str(dist.get_backend_config()).split(",")
        self._backends = dict(pair.split(":", 1) for pair in pairs if ":" in pair)
        self._post = Post(self._size, self._rank, self._gather_vector)

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many processes the group has."""
        return self._size

    # Where data travels

    def _transport(self, device: torch.device) -> torch.device:
        """Return where tensors of a device must be to travel; host backends take the way over host memory."""
        backend = self._backends.get(device.type)
        if backend is not None and backend not in _HOST_BACKENDS:
            return device
        if "cpu" in self._backends or not self._backends:
            return torch.device("cpu")
        return self._default_device()

    def _default_device(self) -> torch.device:
        kind = next((kind for kind, backend in self._backends.items() if backend in _HOST_BACKENDS), None)
        if kind is not None or not self._backends:
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())

    def _gather_vector(self, vector: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty(self._size * vector.numel(), dtype=vector.dtype, device=vector.device)
        _gather_bytes(gathered, vector, group=self.group)
        return gathered

    def _packed(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.device]:
        """Return the tensors as contiguous ones with a dimension, on the device where they travel together."""
        device = self._transport(tensors[0].device) if tensors else self._default_device()
        ready = []
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise TypeError(
                    f"Cannot exchange a tensor of layout {tensor.layout}; convert it with `to_dense()` first."
                )
            tensor = tensor.detach()
            if tensor.device != device:
                tensor = tensor.to(device)
            if tensor.is_complex():
                tensor = tensor.resolve_conj()
            tensor = tensor.contiguous()
            ready.append(tensor.reshape(1) if tensor.ndim == 0 else tensor)
        return ready, device

    # Tensors

    def gather_many(
        self, tensors: Sequence[torch.Tensor], structure: Any = None, operation: str = "gather"
    ) -> list[torch.Tensor]:
        """Return every rank's tensors, each concatenated along its first dimension, in one collective where they are small.

        Raises:
            DistributedOperationException: structure, shapes or dtypes differ between ranks; raised on all of them.
        """
        ready, device = self._packed(tensors)
        letter = self._post.letter(operation, structure, ready, math.inf)
        payload = self._post.exchange(letter, ready, device)
        results, at = [], 0
        for original, tensor in zip(tensors, ready, strict=True):
            shape = (self._size * tensor.shape[0], *tensor.shape[1:])
            if payload is None:
                gathered = self._gather_large(tensor).view(shape)
            else:
                size = tensor.numel() * tensor.element_size()
                gathered = _copied(payload[:, at : at + size]).view(tensor.dtype).view(shape)
                at += size
            results.append(gathered if original.device == device else gathered.to(original.device))
        return results

    def _gather_large(self, tensor: torch.Tensor) -> torch.Tensor:
        # As bytes: not every backend knows every dtype, and to a gather they are the same.
        return self._gather_vector(tensor.view(torch.uint8).reshape(-1)).view(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, concatenated along the first dimension; scalars become a vector."""
        return self.gather_many([tensor])[0]

    def all_gather_into_list(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of the ranks."""
        return (
            [piece.view(tensor.shape) for piece in self.all_gather(tensor).chunk(self._size)]
            if tensor.numel()
            else [tensor.clone() for _ in range(self._size)]
        )

    def reduce_many(self, tensors: Sequence[torch.Tensor], op: str, structure: Any = None) -> list[torch.Tensor]:
        """Return the reductions of several tensors, in one collective where they are small.

        Raises:
            DistributedOperationException: structure, shapes or dtypes differ between ranks; raised on all of them.
        """
        check_reduction(op)
        ready, device = self._packed(tensors)
        letter = self._post.letter("reduce", (op, structure), ready, _LOCAL_WORK // self._size)
        payload = self._post.exchange(letter, ready, device)
        results, at = [], 0
        for original, tensor in zip(tensors, ready, strict=True):
            if payload is None:
                total = tensor.clone()
                dist.all_reduce(total, _OPS[op], group=self.group)
            else:
                size = tensor.numel() * tensor.element_size()
                rows = _copied(payload[:, at : at + size]).view(tensor.dtype).view(self._size, *tensor.shape)
                total = _reduced(rows, op)
                at += size
            total = mean_of(total, self._size) if op == "mean" else total
            results.append(total.view(original.shape).to(original.device))
        return results

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the element-wise reduction over all ranks."""
        return self.reduce_many([tensor], op)[0]

    def broadcast_many(self, tensors: Sequence[torch.Tensor], src: int, structure: Any = None) -> list[torch.Tensor]:
        """Return rank `src`'s tensors, in one collective where they are small.

        Raises:
            DistributedOperationException: structure, shapes, dtypes or `src` differ between ranks; raised on all of them.
            ValueError: there is no rank `src`.
        """
        if not 0 <= src < self._size:
            raise ValueError(f"There is no process {src} to broadcast from; they go from 0 to {self._size - 1}.")
        ready, device = self._packed(tensors)
        letter = self._post.letter("broadcast", (src, structure), ready, _LOCAL_WORK // self._size)
        payload = self._post.exchange(letter, ready, device)
        results, at = [], 0
        for original, tensor in zip(tensors, ready, strict=True):
            if payload is None:
                value = tensor.clone()
                dist.broadcast(value, src, group=self.group)
            else:
                size = tensor.numel() * tensor.element_size()
                value = payload[src, at : at + size].clone().view(tensor.dtype)
                at += size
            results.append(value.view(original.shape).to(original.device))
        return results

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return rank `src`'s tensor."""
        return self.broadcast_many([tensor], src)[0]

    # Objects

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in one collective where the pickled objects are small."""
        buffer = io.BytesIO()
        pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
        payload = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        device = self._default_device()
        self._post.settle()
        room = self._post.room()
        words = [OPERATIONS.index("gather_object"), 0, 0, payload.numel(), 0]
        header = torch.tensor((words + [0] * WORDS)[:WORDS], dtype=torch.int64).view(torch.uint8)
        message = torch.zeros(HEADER + room, dtype=torch.uint8)
        message[:HEADER] = header
        if payload.numel() <= room:
            message[HEADER : HEADER + payload.numel()] = payload
        received = self._gather_vector(message.to(device)).view(self._size, -1).cpu()
        headers = received[:, :HEADER].contiguous()
        rows = headers.view(torch.int64).tolist()
        if any(row[0] != words[0] for row in rows):
            raise differing(headers, "gather_object")
        sizes = [row[3] for row in rows]
        largest = max(sizes)
        if largest <= room:
            payloads = received[:, HEADER:]
        else:
            message = torch.zeros(largest, dtype=torch.uint8)
            message[: payload.numel()] = payload
            payloads = self._gather_vector(message.to(device)).view(self._size, -1).cpu()
        # Objects of a loop differ a little in size; the next power of two lets them pass as alike.
        bucket = 1 << max(largest - 1, SMALLEST).bit_length()
        self._post.agreed(("gather_object", bucket), bucket)
        return [pickle.loads(payloads[rank, :size].numpy().data) for rank, size in enumerate(sizes)]

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements by those of rank `src`."""
        self._post.settle()
        dist.broadcast_object_list(objects, src=src, group=self.group, device=self._default_device())
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._post.settle()
        device = self._default_device()
        if device.type == "cpu":
            dist.barrier(group=self.group)
        else:  # without the index, NCCL guesses the device from the rank
            dist.barrier(group=self.group, device_ids=[device.index])


def _copied(bytes_of_ranks: torch.Tensor) -> torch.Tensor:
    """Return the bytes in memory of their own, one rank after the other: other dtypes need that alignment."""
    return bytes_of_ranks.reshape(-1) if not bytes_of_ranks.is_contiguous() else bytes_of_ranks.clone().view(-1)


def _reduced(rows: torch.Tensor, op: str) -> torch.Tensor:
    if op == "max":
        return rows.amax(0)
    if op == "min":
        return rows.amin(0)
    return rows.sum(0, dtype=rows.dtype)
