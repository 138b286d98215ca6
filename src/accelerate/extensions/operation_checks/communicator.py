"""The communicator of the default process group that finds out whether the ranks call the same, at one collective per call.

Small calls are packed into one collective with the flags of the check; see `calls`.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.base.nested import TENSOR, padded
from accelerate.comm.torch_dist import OPS, TorchCommunicator, as_bytes, dense, device_of
from accelerate.extensions.operation_checks.calls import (
    OBJECTS,
    PACKED,
    Call,
    CallChecker,
    compare_arguments,
    require_same,
)

__all__ = ["CheckedCommunicator", "compare_arguments"]

_LENGTH = 8  # bytes before a pickled object, which say how long it is


class CheckedCommunicator(TorchCommunicator):
    """The communicator of the default process group; each call checks that ranks do the same."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._checker = CallChecker(self.rank)

    # Collectives without a check

    def _make(self, call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Do the operation that all ranks were found to call."""
        if call.size <= PACKED:
            return self._make_packed(call, tensors)[0]
        return self._carry_out(call.argument, tensors, device_of(call.device))

    def _make_packed(
        self, call: Call, tensors: Sequence[torch.Tensor], follows: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Do a small call in one collective, with two flags next to the data: some rank has another call, some rank has this one."""
        device = device_of(call.device)
        # If the first flag is waited for, the second need not be sent: gloo takes longer for each word.
        flags = torch.arange(1 if device.type == "cpu" else 2, device=device)
        flags = flags if follows else 1 - flags
        if isinstance(call.argument, str):
            return self._reduce_packed(call.argument, [tensor.to(device) for tensor in tensors], flags)
        parts = [as_bytes(tensor.to(device).contiguous()) for tensor in tensors]
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
            dist.all_reduce(flat, OPS[op], group=self.group)
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
            device = device_of(expected.device)
            tensors = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in expected.tensors]
        results, flags = self._make_packed(expected, tensors, call == expected)
        return results if self._checker.is_valid(call, expected, flags) else None

    def _exchange(
        self, operation: str, argument: str | int | None, structure: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Do one operation with all tensors, on their devices: as expected, or after comparing the ranks' calls."""
        ready = dense(tensors)
        kinds = tuple((item.dtype, item.shape) for item in ready)
        call = Call(operation, argument, structure, self._transport(ready).type, kinds)
        results = self._as_expected(call, ready)
        if results is None:
            require_same(self, call)
            results = self._make(call, ready)
        self._checker.remember(call)
        return [result.to(tensor.device) for result, tensor in zip(results, tensors, strict=True)]

    def is_same(self, value: Any) -> bool:
        """Return whether all ranks pass values with the same `repr`, by one all-reduce."""
        self._checker.flush()
        return super().is_same(value)

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
            require_same(self, self._object_call(0))
            longest = torch.tensor([len(data)], device=self._default_device())
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
            largest = longest.item()
            # Objects of a loop differ a little in size; the next power of two lets them pass as equal.
            call = self._object_call(1 << (largest - 1).bit_length() if largest <= PACKED else largest)
            results = self._make(call, [padded(data, 0, call.size, 0, False)])
        self._checker.remember(call)
        rows = results[0].view(self.world_size, -1).cpu().numpy()
        return [pickle.loads(row.data[_LENGTH : int.from_bytes(row[:_LENGTH].data, "little")]) for row in rows]

    def _object_call(self, size: int) -> Call:
        return Call(OBJECTS, None, TENSOR, self._default_device().type, ((torch.uint8, torch.Size([size])),))

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        """Replace the elements by those of rank `src`."""
        self._checker.flush()
        return super().broadcast_object_list(objects, src)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self._checker.flush()
        super().barrier()


def _reduced_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which small tensors are added up; integers wrap as they would themselves."""
    if dtype.itemsize >= 4:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32
