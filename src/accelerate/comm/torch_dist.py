"""Communication through `torch.distributed`."""

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.base.nested import TENSOR, padded
from accelerate.comm.base import Communicator
from accelerate.comm.check import OBJECTS, PACKED, Call, CallChecker, same_on_all
from accelerate.runtime import torch_private

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HOST_BACKENDS = ("gloo", "mpi")
_LENGTH = 8  # bytes before a pickled object, which say how long it is
# The name changed in torch 2.13; the old one warns there.
_gather_bytes = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCommunicator(Communicator):
    """The communicator of the default process group; each call checks that ranks do the same."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        pairs = str(dist.get_backend_config()).split(",")
        self._backends = dict(pair.split(":", 1) for pair in pairs if ":" in pair)
        self._checker = CallChecker(self.rank)

    # The device of the exchanged data

    def _transport(self, device: torch.device) -> torch.device:
        """Return where tensors of a device must be to travel; host backends take the way over host memory."""
        backend = self._backends.get(device.type)
        if backend is not None and backend not in _HOST_BACKENDS:
            return device
        return torch.device("cpu") if "cpu" in self._backends else self._default_device()

    def _default_device(self) -> torch.device:
        on_host = not self._backends or any(backend in _HOST_BACKENDS for backend in self._backends.values())
        return _device_of("cpu" if on_host else next(iter(self._backends)))

    # Collectives without a check

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a contiguous tensor; as bytes, for not every backend knows every dtype, and to a gather they are the same."""
        output = tensor.new_empty((self.world_size * tensor.shape[0], *tensor.shape[1:]))
        _gather_bytes(_as_bytes(output), _as_bytes(tensor), group=self.group)
        return output

    def _carry_out(self, call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Do the operation that all ranks were found to call."""
        if call.size <= PACKED:
            return self._carry_out_packed(call, tensors)[0]
        device = _device_of(call.device)
        if call.argument is None:
            return [self._gather(tensor.to(device).contiguous()) for tensor in tensors]
        results = [tensor.to(device, copy=True).contiguous() for tensor in tensors]
        for result in results:
            if isinstance(call.argument, str):
                dist.all_reduce(result, _OPS[call.argument], group=self.group)
            else:
                dist.broadcast(_as_bytes(result), call.argument, group=self.group)
        return results

    def _carry_out_packed(
        self, call: Call, tensors: Sequence[torch.Tensor], follows: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Do a small call in one collective, with two flags next to the data: some rank has another call, some rank has this one."""
        device = _device_of(call.device)
        # If the first flag is waited for, the second need not be sent: gloo takes longer for each word.
        flags = torch.arange(1 if device.type == "cpu" else 2, device=device)
        flags = flags if follows else 1 - flags
        if isinstance(call.argument, str):
            return self._reduce_packed(call.argument, [tensor.to(device) for tensor in tensors], flags)
        parts = [_as_bytes(tensor.to(device).contiguous()) for tensor in tensors]
        row = torch.cat([flags.to(torch.uint8), *parts])
        if call.argument is None:
            rows = self._gather(row).view(self.world_size, -1)
        else:  # one rank's bytes are not zero, so the largest are that rank's
            if self.rank != call.argument:
                row[len(flags) :] = 0
            dist.all_reduce(row, dist.ReduceOp.MAX, group=self.group)
            rows = row[None]
        seen, *pieces = rows.split([len(flags), *map(len, parts)], dim=1)
        results = []
        for piece, (dtype, shape) in zip(pieces, call.tensors, strict=True):
            whole = piece.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
            results.append(whole.view(len(rows) * shape[0], *shape[1:]))
        return results, seen.amax(0)

    def _reduce_packed(
        self, op: str, tensors: Sequence[torch.Tensor], flags: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Reduce small tensors, in one all-reduce for each dtype that backends add up: small ones travel as 32 bits."""
        kinds = [_reduced_as(tensor.dtype) for tensor in tensors]
        results, seen = list(tensors), flags
        for kind in dict.fromkeys(kinds):
            places = [place for place, other in enumerate(kinds) if other is kind]
            parts = [tensors[place].to(kind).reshape(-1) for place in places]
            flat = torch.cat([(-flags if op == "min" else flags).to(kind), *parts])
            dist.all_reduce(flat, _OPS[op], group=self.group)
            seen, *parts = flat.split([len(flags), *map(len, parts)])
            for place, part in zip(places, parts, strict=True):
                results[place] = part.to(tensors[place].dtype, copy=True).view(tensors[place].shape)
        return results, seen

    # Tensors

    def _as_expected(self, call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Carry out the call that all ranks expect; None without one, or if some rank calls another operation."""
        expected = self._checker.expected()
        if expected is None:
            return None
        if call != expected:
            device = _device_of(expected.device)
            tensors = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in expected.tensors]
        results, flags = self._carry_out_packed(expected, tensors, call == expected)
        return results if self._checker.is_valid(call, expected, flags) else None

    def _exchange(
        self, operation: str, argument: str | int | None, structure: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Do one operation with all tensors, on their devices: as expected, or after comparing the ranks' calls."""
        for tensor in tensors:
            if tensor.is_nested:
                raise TypeError(
                    f"Cannot exchange a nested tensor of layout {tensor.layout}; convert it with `to_padded_tensor(0.0)`."
                )
            if tensor.layout is not torch.strided:
                raise TypeError(f"Cannot exchange a tensor of layout {tensor.layout}; convert it with `to_dense()`.")
        ready = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
        device = self._transport(tensors[0].device) if tensors else self._default_device()
        call = Call(operation, argument, structure, device.type, tuple((item.dtype, item.shape) for item in ready))
        results = self._as_expected(call, ready)
        if results is None:
            self.require_same(call)
            results = self._carry_out(call, ready)
        self._checker.remember(call)
        return [result.to(tensor.device) for result, tensor in zip(results, tensors, strict=True)]

    def is_same(self, value: Any) -> bool:
        """Return whether all ranks pass values with the same `repr`, by one all-reduce."""
        self._checker.flush()
        return same_on_all(value, self._default_device(), self.group)

    # Objects

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object; in one collective where objects of about this size were gathered before."""
        message = bytearray(_LENGTH) + pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        message[:_LENGTH] = len(message).to_bytes(_LENGTH, "little")
        data = torch.frombuffer(message, dtype=torch.uint8)
        call, expected = self._object_call(0), self._checker.expected()
        if expected is not None and expected.operation == call.operation and len(data) <= expected.size:
            call = expected
        results = self._as_expected(call, [padded(data, 0, call.size, 0, False)])
        if results is None:
            self.require_same(self._object_call(0))
            longest = torch.tensor([len(data)], device=self._default_device())
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
            largest = longest.item()
            # Objects of a loop differ a little in size; the next power of two lets them pass as equal.
            call = self._object_call(1 << (largest - 1).bit_length() if largest <= PACKED else largest)
            results = self._carry_out(call, [padded(data, 0, call.size, 0, False)])
        self._checker.remember(call)
        rows = results[0].view(self.world_size, -1).cpu().numpy()
        return [pickle.loads(row.data[_LENGTH : int.from_bytes(row[:_LENGTH].data, "little")]) for row in rows]

    def _object_call(self, size: int) -> Call:
        return Call(OBJECTS, None, TENSOR, self._default_device().type, ((torch.uint8, torch.Size([size])),))

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements by those of rank `src`."""
        self._checker.flush()
        dist.broadcast_object_list(objects, src=src, group=self.group, device=self._default_device())
        return objects

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._checker.flush()
        device = self._default_device()
        if device.type == "cpu":
            dist.barrier(group=self.group)
        else:  # without the index, NCCL guesses the device from the rank
            dist.barrier(group=self.group, device_ids=[device.index])


def _device_of(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _reduced_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which small tensors are added up; integers wrap as they would themselves."""
    if dtype.itemsize >= 4:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


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
