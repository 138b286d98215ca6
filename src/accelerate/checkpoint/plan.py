"""What one rank is going to write into a checkpoint: collected first, then written at once, or copied and written later.

Strategies are given a `SavePlan` where they expect a folder: it is path-like, so that one which writes by itself writes into the
folder. What is put into the plan instead is hashed while it is written, and can be written in the background.
"""

import copy
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelerate.checkpoint import dcp, formats
from accelerate.checkpoint.fsdp_state import copy_of, is_spread
from accelerate.checkpoint.manifest import FileEntry
from accelerate.runtime.durable import each

# Files that are written at a time. Two keep a disk busy while one of them waits for its hash or for the interpreter.
WRITERS = 2


class SavePlan(os.PathLike[str]):
    """Files of one rank for the folder of a checkpoint.

    Args:
        folder: the local folder in which they are written.
        rank: this process.
    """

    def __init__(self, folder: str, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self._jobs: dict[str, tuple[Callable[..., FileEntry], Any, dict[str, Any]]] = {}
        self._shards: dict[str, dict[str, Any]] = {}

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

    def add_shards(self, name: str, state: dict[str, Any]) -> None:
        """Add a folder of shards, in torch's sharded format: all ranks add it, and write it together. All ranks.

        Args:
            name: of the folder.
            state: nested dictionaries of what this rank has.
        """
        self._shards[name] = state

    def snapshot(self, buffers: "HostBuffers") -> Callable[[], None]:
        """Replace all that was added by copies in host memory; what the run goes on with is not in the plan any more.

        Args:
            buffers: gives the memory.

        Returns:
            What gives the memory back, once the files are written. If copying fails, that has been done.
        """
        lease = Lease(buffers)
        taken = _Snapshot(lease)
        try:
            self._jobs = {file: (write, taken.of(obj), options) for file, (write, obj, options) in self._jobs.items()}
            self._shards = {name: taken.of(state) for name, state in self._shards.items()}
            lease.synchronize()
        except BaseException:
            lease.release()
            raise
        return lease.release

    def write(self, writers: int = WRITERS, group: Any = None) -> dict[str, FileEntry]:
        """Write the files, durably, and return what the manifest says of them. All ranks if any has shards, else any rank, alone.

        Args:
            writers: files that are written at a time. An interpreter that is about to exit starts no more threads, so what
                may run then takes one.
            group: the ranks that write shards, and how they talk; the default group by default.
        """
        entries: dict[str, FileEntry] = {}
        for name, state in self._shards.items():
            written = dcp.save(state, os.path.join(self.folder, name), group, is_spread)
            entries |= {f"{name}/{file}": entry for file, entry in written.items()}

        def one(file: str) -> FileEntry:
            write, obj, options = self._jobs[file]
            return write(os.path.join(self.folder, file), obj, rank=self.rank, **options)

        # In the order in which they were added: models and optimizers come first, so that the small ones fill the gaps.
        return {**entries, **dict(zip(self._jobs, each(one, self._jobs, writers), strict=True))}


class HostBuffers:
    """Memory of the host that is taken for a save and used again for the next one: new memory costs more than the copy.

    With an accelerator it is pinned, so that copies run beside the computation.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}

    def take(self, size: int, pinned: bool) -> torch.UntypedStorage:
        """Return memory that nobody else has.

        Args:
            size: how many bytes.
            pinned: whether a GPU can copy to it by itself.
        """
        if self._free.get((size, pinned)):
            return self._free[size, pinned].pop()
        made = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return made.untyped_storage()

    def keep(self, buffers: list[tuple[tuple[int, bool], torch.UntypedStorage]]) -> None:
        """Keep memory for the next save. What the last one did not use is let go.

        Args:
            buffers: the memory of one save, by size and kind; nobody reads it any more.
        """
        self._free = {}
        for key, buffer in buffers:
            self._free.setdefault(key, []).append(buffer)


class Lease:
    """The memory that one save has taken.

    Args:
        buffers: where it comes from, and goes back to.
    """

    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._taken: list[tuple[tuple[int, bool], torch.UntypedStorage]] = []
        self._devices: set[torch.device] = set()

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage in host memory; on an accelerator it is complete after `synchronize`.

        Args:
            storage: of any device.
        """
        pinned = storage.device.type == "cuda"
        buffer = self._buffers.take(storage.nbytes(), pinned)
        self._taken.append(((storage.nbytes(), pinned), buffer))
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
        """Give the memory back, once: nobody reads the copies any more."""
        taken, self._taken = self._taken, []
        if taken:
            self._buffers.keep(taken)


def copied(obj: Any) -> Any:
    """Return a copy of a state that shares no tensor, and nothing that can change, with it.

    Args:
        obj: what an object's ``state_dict`` returned.
    """
    return _Snapshot(Lease(HostBuffers()), keeps_devices=True).of(obj)


class _Snapshot:
    """Copies nested objects: tensors into host memory, views of one storage as views of one copy.

    What is in the state twice is in the copy twice, and is one object there, too.
    """

    def __init__(self, lease: Lease, keeps_devices: bool = False) -> None:
        self._lease = lease
        self._keeps_devices = keeps_devices
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, so that its id stays its own

    def of(self, obj: Any) -> Any:
        if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes)):
            return obj
        if id(obj) in self._made:
            return self._made[id(obj)][1]
        if isinstance(obj, torch.Tensor):
            made = self._tensor(obj)
        elif type(obj) in (dict, OrderedDict):
            made = self._note(obj, type(obj)())
            made.update((key, self.of(value)) for key, value in obj.items())
            if type(obj) is OrderedDict:
                vars(made).update(self.of(vars(obj)))  # a state dict has its version there
        elif type(obj) is list:
            made = self._note(obj, [])
            made.extend(self.of(value) for value in obj)
        elif type(obj) is tuple:
            made = tuple(self.of(value) for value in obj)
        else:
            made = _deep(obj)
        return self._note(obj, made)

    def _note(self, obj: Any, made: Any) -> Any:
        self._made[id(obj)] = (obj, made)
        return made

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if is_spread(tensor):
            return copy_of(tensor)
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor or tensor.is_quantized:
            return copy.deepcopy(tensor) if self._keeps_devices else copy.deepcopy(tensor).cpu()
        if self._keeps_devices and tensor.device.type != "cpu":
            return tensor.clone()
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = self._lease.copy(storage)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(self._storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            made = made.conj()
        return made._neg_view() if tensor.is_neg() else made


def _deep(obj: Any) -> Any:
    """A copy of an object of any kind, as what is saved would come back."""
    try:
        return copy.deepcopy(obj)
    except RuntimeError:  # tensors that are results of a computation refuse, but can be saved
        memory = io.BytesIO()
        torch.save(obj, memory)
        memory.seek(0)
        return torch.load(memory, weights_only=False)  # written here a moment ago
