"""How offloaded weights get to where they compute: made present in host memory, or copied to an accelerator."""

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from accelerate.offload.mapped import is_resident, read_pages

Weights = Mapping[str, tuple[torch.Tensor, torch.dtype]]

# Size of each of the pinned buffers that weights travel through; two are enough to fill one while the other is sent.
STAGING_BYTES = 64 * 2**20


class Ready:
    """Weights that were read ahead.

    Args:
        tensors: The weights by name, on the execution device, in the dtype that they have to have.
        event: Recorded behind the copies on their stream; None where there is no stream.
        lane: The lane that they came on, if there is an event.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], event: Any = None, lane: "StreamLane | None" = None) -> None:
        self._tensors = tensors
        self._event = event
        self._lane = lane

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights; what their device's current stream computes from here on waits for their copies."""
        if self._event is not None:
            # Of the weights' device: another one may be current, and each has a stream that is.
            stream = self._lane.namespace.current_stream(self._lane.device)
            stream.wait_event(self._event)
            for tensor in self._tensors.values():
                # The memory belongs to the copying stream, which must not hand it out again before this one is done.
                tensor.record_stream(stream)
        return self._tensors


class Lane:
    """A way to bring weights in.

    Attributes:
        device: Where they compute.
        delivers: Whether `bring` returns weights; else it only shortens the wait for them.
        smallest: Modules with fewer bytes than this are not worth a thread's while.
        off: Whether memory ran out, so that nothing is brought any more.
        worth_waiting: Whether to wait for a module that is being read, rather than to go on without.
    """

    device: torch.device
    delivers: bool = True
    smallest: int = 0
    off: bool = False
    worth_waiting: bool = True

    def bring(self, weights: Weights) -> Ready | None:
        """Read weights. Runs in the prefetching thread.

        Args:
            weights: Name to the weight as it is stored, and the dtype that it has to have.
        """
        raise NotImplementedError

    def unforeseen(self, read: Callable[[], Weights]) -> None:
        """Do what helps a module that runs now and was not read ahead. Runs in the thread that computes.

        Args:
            read: Returns the weights, as for `bring`.
        """


class PageLane(Lane):
    """For weights that compute where they are mapped: their pages are read and mapped ahead.

    Pages that are in memory are best mapped as a computation comes to them. Those that are not are read several times faster in
    one go than a fault at a time, so that it is worth waiting for them.
    """

    delivers = False
    smallest = 256 * 1024

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.worth_waiting = False
        self._mapped: set[int] = set()

    def bring(self, weights: Weights) -> None:
        """Have the pages present."""
        resident = {name: is_resident(tensor) for name, (tensor, _) in weights.items()}
        self.worth_waiting = not all(resident.values())
        for name, (tensor, _) in weights.items():
            # Going through pages that are mapped already would only take time from who computes.
            if not resident[name] or tensor.data_ptr() not in self._mapped:
                read_pages(tensor)
                self._mapped.add(tensor.data_ptr())

    def unforeseen(self, read: Callable[[], Weights]) -> None:
        """Have the pages present, if the disk has to be waited for anyway."""
        for tensor, _ in read().values():
            if not is_resident(tensor):
                read_pages(tensor)


class HostLane(Lane):
    """For weights that compute on the CPU in another dtype than they are stored in: they are cast ahead."""

    smallest = 64 * 1024

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def bring(self, weights: Weights) -> Ready:
        """Read and cast."""
        brought = {}
        for name, (tensor, dtype) in weights.items():
            read_pages(tensor)
            brought[name] = tensor if tensor.dtype is dtype else tensor.to(dtype)
        return Ready(brought)


class StreamLane(Lane):
    """For weights that compute on an accelerator: cast into pinned buffers, and sent on a stream of their own.

    Args:
        device: The accelerator, with its index.
        namespace: Its torch module, such as ``torch.cuda``, with ``Stream``, ``Event``, ``stream`` and ``current_stream``.
        staging_bytes: Size of each of the two pinned buffers.

    Source:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
    """

    def __init__(self, device: torch.device, namespace: ModuleType, staging_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        self.namespace = namespace
        self._staging_bytes = staging_bytes
        self._stream: Any = None
        self._buffers: list[torch.Tensor] = []
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def bring(self, weights: Weights) -> Ready:
        """Send the weights; the copies may still be under way when this returns."""
        if self._stream is None:
            self._buffers = [self._pinned(), self._pinned()]
            self._stream = self.namespace.Stream(device=self.device)
        arrived = {name: self._send(tensor, dtype) for name, (tensor, dtype) in weights.items()}
        event = self.namespace.Event()
        event.record(self._stream)
        return Ready(arrived, event, self)

    def _pinned(self) -> torch.Tensor:
        return torch.empty(self._staging_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _send(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        tensor = tensor.detach()
        with torch.no_grad(), self.namespace.stream(self._stream):
            if not tensor.is_contiguous():
                return tensor.to(self.device, dtype)  # keeps the strides, on which the bits of results may depend
            flat = tensor.reshape(-1)
            arrived = torch.empty(flat.shape, dtype=dtype, device=self.device)
            for begin, end in self._chunks(flat.numel(), dtype):
                buffer = self._next_buffer()[: (end - begin) * dtype.itemsize].view(dtype)
                buffer.copy_(flat[begin:end])  # reads the file and casts, while the chunk before is on its way
                arrived[begin:end].copy_(buffer, non_blocking=True)
                self._sent[self._turn].record(self._stream)
        return arrived.reshape(tensor.shape)

    def _chunks(self, count: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        step = self._staging_bytes // dtype.itemsize
        for begin in range(0, count, step):
            yield begin, min(begin + step, count)

    def _next_buffer(self) -> torch.Tensor:
        """The buffer that was sent longest ago, once it has arrived."""
        self._turn = 1 - self._turn
        if self._sent[self._turn] is None:
            self._sent[self._turn] = self.namespace.Event()
        else:
            self._sent[self._turn].synchronize()
        return self._buffers[self._turn]
