"""Copies in host memory of what a save has collected, so that the training may change the originals meanwhile."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from accelerate.checkpoint import plain_data
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import empty_on_host_like, is_distributed_tensor, local_tensor, quietly
from accelerate.runtime import torch_private


@quietly()
@torch.no_grad()
def snapshot(plan: SavePlan, buffers: "HostBuffers") -> None:
    """Replace all that a plan has by copies in host memory of `buffers`, which takes it back when copying fails."""
    try:
        plan.replace(_Snapshot(buffers).of)
        buffers.synchronize()
    except BaseException:
        buffers.release()
        raise


class HostBuffers:
    """Host memory for the copies of one save at a time, used again by the next one; pinned where a GPU is copied."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = {}
        self._taken: list[tuple[Any, Any]] = []
        self._devices: set[torch.device] = set()

    def _take(self, key: Any, make: Callable[[], Any]) -> Any:
        free = self._free.get(key)
        self._taken.append((key, free.pop() if free else make()))
        return self._taken[-1][1]

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage; of an accelerator's it is complete after `synchronize`."""
        size, pinned = storage.nbytes(), storage.device.type == "cuda"
        memory: torch.Tensor = self._take(
            (size, pinned), lambda: torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        )
        dtype = torch.uint8 if size % 4 else torch.int32  # torch copies single bytes slower
        source = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        memory.view(dtype).copy_(source, non_blocking=pinned)
        if pinned:
            self._devices.add(storage.device)
        return memory.untyped_storage()

    def shell(self, value: torch.Tensor) -> torch.Tensor:
        """Return a DTensor or ShardedTensor of the host with a value's knowledge of the whole, and memory that is not filled."""
        spread = [getattr(value, name, None) for name in ("device_mesh", "placements")]
        key = type(value), *spread, value.size(), value.dtype, local_tensor(value).shape
        memory: torch.Tensor = self._take(key, lambda: empty_on_host_like(value))
        return memory

    def synchronize(self) -> None:
        """Wait until the copies are complete."""
        while self._devices:
            torch.cuda.synchronize(self._devices.pop())

    def release(self) -> None:
        """Keep the memory for the next save, once: no thread reads the copies any more. What this save did not use is let go."""
        taken, self._taken = self._taken, []
        if taken:
            self._free = {}
            for key, buffer in taken:
                self._free.setdefault(key, []).append(buffer)


class _Snapshot:
    """Copies nested objects into host memory: views of one storage as views of one copy, and each object once."""

    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, so that its id stays its own

    def of(self, obj: Any) -> Any:
        return plain_data.rebuilt(obj, self._value)

    def _value(self, obj: Any) -> Any:
        if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes)):
            return obj
        if id(obj) not in self._made:
            made = self._tensor(obj) if isinstance(obj, torch.Tensor) else plain_data.deep_copied(obj)
            self._made[id(obj)] = obj, made
        return self._made[id(obj)][1]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_distributed_tensor(tensor):
            mine, made = local_tensor(tensor).detach(), self._buffers.shell(tensor)
            if type(mine) is torch.Tensor:
                local_tensor(made).set_(self._copied(mine), mine.storage_offset(), mine.shape, mine.stride())
            else:
                local_tensor(made).detach().copy_(mine)
            return made
        tensor = tensor.detach()
        if tensor.is_nested:
            return tensor.clone().cpu()
        if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) is not torch.Tensor:
            return copy.deepcopy(tensor).cpu()
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(self._copied(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            made = made.conj()
        return torch_private.neg_view(made) if tensor.is_neg() else made

    def _copied(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = self._buffers.copy(storage)
        return self._storages[key]
