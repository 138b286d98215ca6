"""What one rank is going to write into a checkpoint: collected first, then written at once, or copied and written later.

Strategies are given a `Parcel` where they expect a folder: it is path-like, so that one which writes by itself writes into the
folder. What is put into the parcel instead is hashed while it is written, and can be written in the background.
"""

import copy
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import FileEntry
from accelerate.checkpoint.memory import fresh

# Files that are written at a time. Two keep a disk busy while one of them waits for its hash or for the interpreter.
WRITERS = 2


class Parcel(os.PathLike[str]):
    """Files of one rank for the folder of a checkpoint.

    Args:
        folder: the local folder in which they are written.
        rank: this process.
    """

    def __init__(self, folder: str, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self._jobs: dict[str, tuple[Callable[..., FileEntry], Any, dict[str, Any]]] = {}

    def __fspath__(self) -> str:
        return self.folder

    def add_tensors(self, file: str, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
        """Add a file of tensors in safetensors' format.

        Args:
            file: its name in the folder.
            tensors: by name.
            **options: ``metadata`` and ``aliases`` of `formats.write_safetensors`.
        """
        for name, tensor in tensors.items():
            formats.check_storable(name, tensor)
        self._jobs[file] = (formats.write_safetensors, dict(tensors), options)

    def add_object(self, file: str, obj: Any) -> None:
        """Add a file in torch's format.

        Args:
            file: its name in the folder.
            obj: what `torch.save` takes.
        """
        self._jobs[file] = (formats.write_torch, obj, {})

    def add_bytes(self, file: str, data: bytes) -> None:
        """Add a file that is its bytes.

        Args:
            file: its name in the folder.
            data: its content.
        """
        self._jobs[file] = (formats.write_bytes, data, {})

    def snapshot(self, buffers: "HostBuffers") -> None:
        """Replace all that was added by copies in host memory; what the run goes on with is not in the parcel any more.

        Args:
            buffers: gives the memory, and gets it back with `HostBuffers.release`.
        """
        taken = _Snapshot(buffers)
        self._jobs = {file: (write, taken.of(obj), options) for file, (write, obj, options) in self._jobs.items()}
        buffers.synchronize()

    def write(self, writers: int = WRITERS) -> dict[str, FileEntry]:
        """Write the files, durably, and return what the manifest says of them. Any rank, alone.

        Args:
            writers: files that are written at a time. An interpreter that is about to exit starts no more threads, so what
                may run then takes one.
        """

        def one(file: str) -> FileEntry:
            write, obj, options = self._jobs[file]
            return write(os.path.join(self.folder, file), obj, rank=self.rank, **options)

        # The largest first, so that the small ones fill the gaps.
        order = sorted(self._jobs, key=lambda file: nbytes(self._jobs[file][1]), reverse=True)
        if min(writers, len(order)) < 2:
            return {file: one(file) for file in order}
        with ThreadPoolExecutor(min(writers, len(order)), thread_name_prefix="checkpoint") as pool:
            return dict(zip(order, pool.map(one, order), strict=True))


def nbytes(obj: Any) -> int:
    """Return how many bytes the tensors in nested containers have.

    Args:
        obj: any value.
    """
    if isinstance(obj, torch.Tensor):
        return obj.numel() * obj.element_size()
    if isinstance(obj, Mapping):
        return sum(nbytes(value) for value in obj.values())
    if isinstance(obj, (list, tuple)):
        return sum(nbytes(value) for value in obj)
    return 0


class HostBuffers:
    """Memory of the host that is taken for a save and used again for the next one: new memory costs more than the copy.

    With an accelerator it is pinned, so that copies run beside the computation.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._taken: list[tuple[tuple[int, bool], torch.UntypedStorage]] = []
        self._devices: set[torch.device] = set()

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage in host memory; on an accelerator it is complete after `synchronize`.

        Args:
            storage: of any device.
        """
        pinned = storage.device.type == "cuda"
        key = (storage.nbytes(), pinned)
        if self._free.get(key):
            buffer = self._free[key].pop()
        else:
            made = (
                torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                if pinned
                else fresh(storage.nbytes())
            )
            buffer = made.untyped_storage()
        self._taken.append((key, buffer))
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.empty(0, dtype=torch.uint8).set_(buffer).copy_(source, non_blocking=pinned)
        if pinned:
            self._devices.add(storage.device)
        return buffer

    def synchronize(self) -> None:
        """Wait until the copies are complete."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._devices.clear()

    def release(self) -> None:
        """Take the memory back: nobody reads the copies any more. What the last save did not use is let go."""
        self._free = {}
        for key, buffer in self._taken:
            self._free.setdefault(key, []).append(buffer)
        self._taken = []


class _Snapshot:
    """Copies nested objects: tensors into host memory, views of one storage as views of one copy."""

    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}

    def of(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if type(obj) is dict or isinstance(obj, dict) and type(obj).__reduce__ is dict.__reduce__:
            return {key: self.of(value) for key, value in obj.items()}
        if type(obj) in (list, tuple):
            return type(obj)(self.of(value) for value in obj)
        if isinstance(obj, Mapping) and type(obj).__module__ == "collections":
            made = type(obj)()
            made.update((key, self.of(value)) for key, value in obj.items())
            return made
        if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes)):
            return obj
        return copy.deepcopy(obj)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor or tensor.is_quantized:
            return copy.deepcopy(tensor).cpu()
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = self._buffers.copy(storage)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(self._storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            made = made.conj()
        return made._neg_view() if tensor.is_neg() else made
