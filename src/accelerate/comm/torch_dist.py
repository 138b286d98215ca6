"""Communication through `torch.distributed`."""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.comm.base import Communicator, check_reduction, mean_of
from accelerate.comm.check import GATHER_INLINE, HEADER, LARGEST, OPERATIONS, SMALLEST, Post, differing, header

# Bytes that travel in about the time of one more round trip.
_ROUND_TRIP = 256 << 10
_OBJECT = OPERATIONS.index("gather_object")

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HOST_BACKENDS = ("gloo", "mpi")
# The name changed in torch 2.13; the old one warns there.
_gather_bytes = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCommunicator(Communicator):
    """The communicator of the default process group; each call checks that ranks do the same."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        pairs = str(dist.get_backend_config()).split(",")
        self._backends = dict(pair.split(":", 1) for pair in pairs if ":" in pair)
        self._post = Post(self.world_size, self._gather_into)

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

    def _gather_into(
        self, output: torch.Tensor, vector: torch.Tensor, later: bool = False
    ) -> Callable[[], Any] | None:
        work = _gather_bytes(output, vector, group=self.group, async_op=later)
        return work.wait if later else None

    def _prepared(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.device]:
        """Return the tensors without gradients and with a dimension, and the device where they travel together."""
        ready = []
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise TypeError(f"Cannot exchange a tensor of layout {tensor.layout}; convert it with `to_dense()`.")
            tensor = tensor.detach()
            ready.append(tensor if tensor.ndim else tensor.reshape(1))
        return ready, self._transport(tensors[0].device) if tensors else self._default_device()

    def release(self) -> None:
        """Drop the buffers that are kept for the next exchange; what it will be is still known. Any rank, alone."""
        self._post.release()

    # Tensors

    def gather_many(
        self, tensors: Sequence[torch.Tensor], structure: Any = None, operation: str = "gather"
    ) -> list[torch.Tensor]:
        """Return every rank's tensors, in one collective if small; ranks must pass alike."""
        ready, device = self._prepared(tensors)
        letter = self._post.letter(operation, structure, ready, GATHER_INLINE)
        outcome = self._post.exchange(letter, ready, device)
        if outcome.views is not None:
            # Copies: the views are of a buffer that the next exchange overwrites.
            results = [view.clone(memory_format=torch.contiguous_format).flatten(0, 1) for view in outcome.views]
        elif outcome.gathered is not None:
            results = outcome.gathered
        else:
            results = [self._post.gather_large(tensor.to(device).contiguous()) for tensor in ready]
        return _returned(results, tensors)

    def _reduce_inline(self) -> float:
        # Gathering everything and reducing locally saves the round trip of a check, but moves more than a ring: by this
        # factor per byte. With two ranks both move the same.
        surplus = (self.world_size - 1) * (1 - 2 / self.world_size)
        return LARGEST if surplus <= 0 else min(LARGEST, _ROUND_TRIP / surplus)

    def reduce_many(self, tensors: Sequence[torch.Tensor], op: str, structure: Any = None) -> list[torch.Tensor]:
        """Return the reductions, in one collective if small; ranks must pass alike."""
        check_reduction(op)
        ready, device = self._prepared(tensors)
        letter = self._post.letter("reduce", (op, structure), ready, self._reduce_inline())
        outcome = self._post.exchange(letter, ready, device)
        if outcome.views is not None:
            results = [_reduced(view, op) for view in outcome.views]
        else:
            results = [tensor.to(device, copy=True).contiguous() for tensor in ready]
            for total in results:
                dist.all_reduce(total, _OPS[op], group=self.group)
        if op == "mean":
            results = [mean_of(total, self.world_size) for total in results]
        return _returned([total.view(tensor.shape) for total, tensor in zip(results, tensors, strict=True)], tensors)

    def broadcast_many(self, tensors: Sequence[torch.Tensor], src: int, structure: Any = None) -> list[torch.Tensor]:
        """Return rank `src`'s tensors, in one collective if small; ranks must pass alike."""
        if not 0 <= src < self.world_size:
            raise ValueError(f"There is no process {src} to broadcast from; they go from 0 to {self.world_size - 1}.")
        ready, device = self._prepared(tensors)
        letter = self._post.letter("broadcast", (src, structure), ready, min(LARGEST, _ROUND_TRIP / self.world_size))
        outcome = self._post.exchange(letter, ready, device)
        if outcome.views is not None:
            results = [view[src].clone() for view in outcome.views]
        else:
            results = [tensor.to(device, copy=True).contiguous() for tensor in ready]
            for value in results:  # as bytes, for gloo before torch 2.9 knows no complex numbers
                dist.broadcast(value.view(torch.uint8), src, group=self.group)
        return _returned([value.view(tensor.shape) for value, tensor in zip(results, tensors, strict=True)], tensors)

    # Objects

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in one collective where the pickled objects are small."""
        buffer = io.BytesIO()
        pickle.dump(obj, buffer, pickle.HIGHEST_PROTOCOL)
        payload = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        device = self._default_device()
        self._post.compare_last()
        room = self._post.room()
        message = torch.zeros(HEADER + room, dtype=torch.uint8)
        message[:HEADER] = header([_OBJECT, 0, 0, payload.numel(), 0])
        if payload.numel() <= room:
            message[HEADER : HEADER + payload.numel()] = payload
        received = torch.empty(self.world_size * message.numel(), dtype=torch.uint8, device=device)
        self._post.transfer(received, message.to(device), None)
        received = received.view(self.world_size, -1).cpu()
        headers = received[:, :HEADER].contiguous()
        rows = headers.view(torch.int64).tolist()
        if any(row[0] != _OBJECT for row in rows):
            raise differing(headers, "gather_object")
        sizes = [row[3] for row in rows]
        largest = max(sizes)
        if largest <= room:
            payloads = received[:, HEADER:]
        else:
            message = torch.zeros(largest, dtype=torch.uint8)
            message[: payload.numel()] = payload
            payloads = self._post.gather_large(message.to(device)).view(self.world_size, -1).cpu()
        # Objects of a loop differ a little in size; the next power of two lets them pass as alike.
        bucket = 1 << max(largest - 1, SMALLEST).bit_length()
        self._post.remember(("gather_object", bucket), bucket if bucket <= LARGEST else 0)
        return [pickle.loads(payloads[rank, :size].numpy().data) for rank, size in enumerate(sizes)]

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements by those of rank `src`."""
        self._post.compare_last()
        dist.broadcast_object_list(objects, src=src, group=self.group, device=self._default_device())
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._post.compare_last()
        device = self._default_device()
        if device.type == "cpu":
            dist.barrier(group=self.group)
        else:  # without the index, NCCL guesses the device from the rank
            dist.barrier(group=self.group, device_ids=[device.index])


def _returned(results: list[torch.Tensor], originals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Move results to where the originals are."""
    return [
        result if result.device == original.device else result.to(original.device)
        for result, original in zip(results, originals, strict=True)
    ]


def _reduced(rows: torch.Tensor, op: str) -> torch.Tensor:
    if op == "max":
        return rows.amax(0)
    if op == "min":
        return rows.amin(0)
    return rows.sum(0, dtype=rows.dtype)
