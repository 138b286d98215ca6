"""Saving a checkpoint: what each rank puts into it, who stages, writes and publishes, and what is verified before a load.

A rank collects its files in a `SavePlan`. It is path-like, so that strategies which write by themselves write into its folder; what is put
into it instead is hashed while it is written, and can be copied and written in the background.
"""

import copy
import io
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accelerate.checkpoint import formats, manifest
from accelerate.checkpoint.barrier import SaveBarrier, default_store
from accelerate.checkpoint.manifest import FileEntry, Manifest
from accelerate.checkpoint.state import is_spread, like, part, quietly
from accelerate.checkpoint.storage import CheckpointStorage
from accelerate.runtime import durable

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

# Files that are written at a time. Two keep a disk busy while one of them waits for its hash or for the interpreter.
WRITERS = 2

# -- what one rank writes ----------------------------------------------------------------------------------------------


class SavePlan(os.PathLike[str]):
    """Files of one rank for the folder of a checkpoint.

    Args:
        folder: the local folder in which they are written.
        rank: this process.
        writes_shared: whether it writes the files of what all ranks have alike.
    """

    def __init__(self, folder: str, rank: int = 0, writes_shared: bool = True) -> None:
        self.folder = folder
        self.rank = rank
        self.writes_shared = writes_shared
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

    @quietly()
    @torch.no_grad()
    def snapshot(self, buffers: "HostBuffers") -> Callable[[], None]:
        """Replace all that was added by copies in host memory; what the run goes on with is not in the plan any more.

        Args:
            buffers: gives the memory.

        Returns:
            What gives the memory back, once the files are written. If copying fails, that has been done.
        """
        taken = _Snapshot(buffers)
        try:
            self._jobs = {file: (write, taken.of(obj), options) for file, (write, obj, options) in self._jobs.items()}
            self._shards = {name: taken.of(state) for name, state in self._shards.items()}
            buffers.synchronize()
        except BaseException:
            buffers.release()
            raise
        return buffers.release

    def write(self, writers: int = WRITERS, group: Any = None) -> dict[str, FileEntry]:
        """Write the files, durably, and return what the manifest says of them. All ranks if any has shards, else any rank, alone.

        Args:
            writers: files that are written at a time. An interpreter that is about to exit starts no more threads, so what
                may run then takes one.
            group: the ranks that write shards, and how they talk; the default group by default.
        """
        entries: dict[str, FileEntry] = {}
        for name, state in self._shards.items():
            from accelerate.checkpoint import shards  # here: with torch's planner

            written = shards.save(state, os.path.join(self.folder, name), group)
            entries |= {f"{name}/{file}": entry for file, entry in written.items()}

        def one(file: str) -> FileEntry:
            write, obj, options = self._jobs[file]
            return write(os.path.join(self.folder, file), obj, rank=self.rank, **options)

        # In the order in which they were added: models and optimizers come first, so that the small ones fill the gaps.
        return {**entries, **dict(zip(self._jobs, durable.each(one, self._jobs, writers), strict=True))}


class HostBuffers:
    """Memory of the host into which one save at a time is copied; the next one uses it again, because new memory costs more than the copy.

    With an accelerator it is pinned, so that copies run beside the computation.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Any]] = {}
        self._taken: list[tuple[Any, Any]] = []
        self._devices: set[torch.device] = set()

    def _take(self, key: Any, make: Callable[[], Any]) -> Any:
        free = self._free.get(key)
        self._taken.append((key, free.pop() if free else make()))
        return self._taken[-1][1]

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage; of an accelerator's it is complete after `synchronize`.

        Args:
            storage: of any device.
        """
        size, pinned = storage.nbytes(), storage.device.type == "cuda"
        memory = self._take((size, pinned), lambda: torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        dtype = torch.uint8 if size % 4 else torch.int32  # torch copies single bytes slower
        source = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        memory.view(dtype).copy_(source, non_blocking=pinned)
        if pinned:
            self._devices.add(storage.device)
        return memory.untyped_storage()

    def copy_shards(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of what this rank has of a DTensor or ShardedTensor, with the same knowledge of the whole.

        Args:
            value: of any device.
        """
        mine, spread = part(value), [getattr(value, name, None) for name in ("device_mesh", "placements")]
        made = self._take((type(value), *spread, value.size(), value.dtype, mine.shape), lambda: like(value))
        part(made).copy_(mine)
        return made

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


def copied(obj: Any) -> Any:
    """Return a copy of a state that shares no tensor, and nothing that can change, with it.

    Args:
        obj: what an object's ``state_dict`` returned.
    """
    return _Snapshot(HostBuffers(), keeps_devices=True).of(obj)


class _Snapshot:
    """Copies nested objects: tensors into host memory, views of one storage as views of one copy.

    What is in the state twice is in the copy twice, and is one object there, too.
    """

    def __init__(self, buffers: HostBuffers, keeps_devices: bool = False) -> None:
        self._buffers = buffers
        self._keeps_devices = keeps_devices
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, so that its id stays its own

    def of(self, obj: Any) -> Any:
        return formats.rebuilt(obj, self._value)

    def _value(self, obj: Any) -> Any:
        if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes)):
            return obj
        if id(obj) not in self._made:
            made = self._tensor(obj) if isinstance(obj, torch.Tensor) else _deep(obj)
            self._made[id(obj)] = obj, made
        return self._made[id(obj)][1]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_spread(tensor):
            return self._buffers.copy_shards(tensor)
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor or tensor.is_quantized:
            return copy.deepcopy(tensor) if self._keeps_devices else copy.deepcopy(tensor).cpu()
        if self._keeps_devices and tensor.device.type != "cpu":
            return tensor.clone()
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = self._buffers.copy(storage)
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


# -- the ranks of a checkpoint ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The ranks of a checkpoint, as one of them sees them.

    Attributes:
        rank: this process.
        world_size: how many there are.
        local_rank: number of this process on its node.
        local_world_size: how many there are on its node.
        each_node: every node has a file system, and a checkpoint, of its own.
        shared: all ranks see what one of them stages.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    each_node: bool
    shared: bool

    @classmethod
    def of(cls, accelerator: "Accelerator", storage: CheckpointStorage) -> "Group":
        """Return the group of an Accelerator.

        Args:
            accelerator: The Accelerator.
            storage: Where the checkpoint is.
        """
        # A storage that is no file system is the same for all nodes.
        each_node = accelerator.project_configuration.save_on_each_node and storage.shared
        return cls(
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.local_process_index,
            # Where no launcher sets it, each rank looks after itself.
            int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
            each_node,
            storage.shared and not each_node,
        )

    @property
    def leader(self) -> int:
        """The rank that stages the folder that this one writes to."""
        return 0 if self.shared else self.rank - self.local_rank

    def barrier(self, kind: str, storage: CheckpointStorage) -> SaveBarrier:
        """Return the barrier of these ranks.

        Args:
            kind: ``"save_state"`` or ``"load_state"``.
            storage: Where the checkpoint is.
        """
        local_rank = None if self.shared else self.local_rank
        store = default_store()
        return SaveBarrier(kind, storage.location, self.rank, self.world_size, store, local_rank, self.each_node)


class Save:
    """The saving of one checkpoint. Each rank makes one and goes through the same steps.

    Args:
        storage: Where the checkpoint goes.
        group: The ranks.
        facts: What the manifest says of the run.
        refusing: Called with the storage by the leader before it stages; raises where the storage must not be taken.
        rotating: Called with the storage by the rank that published, once the checkpoint is there.

    Attributes:
        plan: What takes the files of this rank; from `begin` on.
        problem: Why this rank cannot go on; the next step of all ranks reports it.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        group: Group,
        facts: dict[str, Any],
        refusing: Callable[[CheckpointStorage], Any] | None = None,
        rotating: Callable[[CheckpointStorage], Any] | None = None,
    ) -> None:
        self.storage = storage
        self.group = group
        self.facts = facts
        self.rotating = rotating
        # The process group of the ranks that write shards together; None for the default one.
        self.shards: Any = None
        self.refusing = refusing
        self.barrier = group.barrier("save_state", storage)
        self.plan: SavePlan | None = None
        self.problem: BaseException | None = None
        self._leader, self._publishes = group.leader, False

    def begin(self, former: BaseException | None = None) -> None:
        """Meet the other ranks, and learn where to write.

        Args:
            former: What this rank has to raise anyhow; then all raise, and nothing is saved.

        Raises:
            CollectiveMisuse: the others do something else.
            RuntimeError: the folder could not be made; on the rank that tried, its own error.
        """
        self.barrier.begin()
        ranks, leader = self.barrier.ranks, self.barrier.leader(self.group.leader)
        self._leader = leader if leader in ranks else ranks[0]
        self._publishes = self.group.rank == (self._leader if self.group.each_node else ranks[0])
        self.problem = former
        staged = self._attempt(self._stage) if self._leads else None
        notes = self._exchange([staged, self.storage.generation])
        if self._leads and notes[0][1]:
            self.storage.generation = notes[0][1]
        staged = notes[ranks.index(self._leader)][0]
        first = (self.group.local_rank if self.group.each_node else self.group.rank) == 0
        self.plan = SavePlan(staged, self.group.rank, writes_shared=first)

    @property
    def _leads(self) -> bool:
        return self._leader == self.group.rank

    def settle(self) -> None:
        """Learn whether all ranks could collect their state; before the rest is done in the background. All ranks.

        Raises:
            RuntimeError: another rank could not; this one's own error is raised as it is.
        """
        self._exchange(None)

    def finish(self, writers: int = WRITERS) -> None:
        """Write this rank's files, and publish the checkpoint when every rank has. May run in a thread.

        Args:
            writers: files that are written at a time.

        Raises:
            RuntimeError: another rank failed; this one's own error is raised as it is.
        """
        entries = self._attempt(lambda: self.plan.write(writers, self.shards))
        notes = self._exchange([self._leader, listed(entries)])
        if self._leads:
            entries = self._attempt(lambda: self._complete(notes, writers))
        if not self.group.shared:  # several ranks lead, and none publishes if one of them has failed
            notes = self._exchange(listed(entries if self._leads else {}))
            if not self.group.each_node:
                entries = merged(notes)  # all nodes have uploaded their part of one checkpoint
        if self._publishes:
            self._attempt(lambda: self._publish(entries))
        self._exchange(None)
        self.barrier.leave()

    def _attempt(self, step: Callable[[], Any]) -> Any:
        """Take a step, unless this rank has failed before; the next exchange of all ranks reports what it raises."""
        try:
            return step() if self.problem is None else None
        except BaseException as error:  # a rank that leaves without a word is waited for
            self.problem = error

    def _exchange(self, note: Any) -> list[Any]:
        """Return the notes of all ranks, unless one of them has failed: then nothing is saved."""
        try:
            return self.barrier.exchange(note, self.problem)
        except BaseException:
            if self._leads:
                self.storage.abandon()
            raise

    def _stage(self) -> str:
        if self.refusing is not None:
            self.refusing(self.storage)
        return self.storage.stage()

    def _complete(self, notes: list[Any], threads: int) -> dict[str, FileEntry]:
        """Return all files of the folder: what its ranks wrote, and what hooks and strategies wrote by themselves."""
        entries = merged(files for leader, files in notes if leader == self._leader)
        entries |= unlisted(self.plan.folder, entries, self.group.rank, threads)
        if not self.storage.shared:
            self.storage.upload(self.plan.folder)
        return entries

    def _publish(self, entries: dict[str, FileEntry]) -> None:
        Manifest(entries, save=self.barrier.name, **self.facts).write(self.plan.folder)
        self.storage.publish()
        if self.rotating is not None:
            self.rotating(self.storage)


def listed(entries: Mapping[str, FileEntry] | None) -> dict[str, Any]:
    """Return entries as JSON, for the other ranks.

    Args:
        entries: by name; None where they could not be made.
    """
    return {name: entry.to_json() for name, entry in (entries or {}).items()}


def merged(notes: Iterable[dict[str, Any]]) -> dict[str, FileEntry]:
    """Return the files that several ranks `listed`.

    Args:
        notes: what they listed.
    """
    return {name: FileEntry.from_json(entry) for note in notes for name, entry in note.items()}


def unlisted(folder: str, known: Iterable[str], rank: int, threads: int = 1) -> dict[str, FileEntry]:
    """Return entries of the files in a folder that no rank has listed. One process per folder.

    Args:
        folder: the staged folder.
        known: paths that are accounted for.
        rank: who speaks for them.
        threads: how many pieces of a file are hashed at a time.

    Raises:
        ValueError: a file has a name that no manifest may have.
    """
    known, found = set(known), {}
    for where, _, entries in os.walk(folder):
        for entry in entries:
            path = os.path.join(where, entry)
            name = os.path.relpath(path, folder).replace(os.sep, "/")
            if name not in known and name != manifest.NAME:
                if not manifest.is_inside(name):
                    raise ValueError(
                        f"The file {name!r} cannot be part of a checkpoint, because not every system can have a file of that name. "
                        "Let the hook that writes it choose a name without a backslash, and without a colon behind one letter."
                    )
                found[name] = formats.describe(path, rank, threads)
    return found


def shares(state_manifest: Manifest, group: Group) -> list[str]:
    """Return the files that this rank verifies: the ranks of a node share the work of hashing.

    Args:
        state_manifest: its manifest.
        group: the ranks.
    """
    order = sorted(state_manifest.files, key=lambda name: (-state_manifest.files[name].size, name))
    local = min(max(1, group.local_world_size), group.world_size)
    return sorted(order[group.local_rank % local :: local])


def damage(folder: str, state_manifest: Manifest, chosen: Iterable[str]) -> list[str]:
    """Return what is wrong with a checkpoint, as far as this rank looks. Any rank, alone.

    Args:
        folder: its local folder.
        state_manifest: its manifest.
        chosen: the files that are hashed.
    """
    chosen = frozenset(chosen)
    found = manifest.problems(folder, state_manifest)
    return found or manifest.problems(
        folder, state_manifest, deep=True, only=chosen.__contains__, threads=durable.threads()
    )
