"""Saving a checkpoint: what each rank puts into it, and who stages, writes and publishes.

A rank collects its files in a `SavePlan`. It is path-like, so that strategies which write by themselves write into its folder; what is put
into it instead is hashed while it is written, and can be copied and written in the background.
"""

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from accelerate.checkpoint import formats, manifest
from accelerate.checkpoint.barrier import Group, SaveBarrier, default_store
from accelerate.checkpoint.manifest import FileEntry, Manifest
from accelerate.checkpoint.state import LOADERS, POSITIONS, Common, keeps_state
from accelerate.checkpoint.storage import CheckpointStorage, refuse_unreadable
from accelerate.data import resume
from accelerate.data.loader import PreparedLoader
from accelerate.modules.unwrap import clean_state_dict_for_safetensors, same_tensors
from accelerate.process import PartialState
from accelerate.runtime import durable

# Files that are written at a time. Two keep a disk busy while one of them waits for its hash or for the interpreter.
WRITERS = 2

# -- what one rank writes ----------------------------------------------------------------------------------------------


class SavePlan(os.PathLike[str]):
    """Files of one rank for the folder of a checkpoint; `writes_shared`: those too that all ranks have alike.

    `create` gives the file of a name to write to; by default one in the folder.
    """

    def __init__(
        self, folder: str, rank: int = 0, writes_shared: bool = True, create: formats.Create | None = None
    ) -> None:
        self.folder = folder
        self.create = create or (lambda name: durable.durable(os.path.join(folder, name)))
        self.rank = rank
        self.writes_shared = writes_shared
        self._jobs: dict[str, tuple[Callable[..., FileEntry], Any, dict[str, Any]]] = {}
        self._shards: dict[str, dict[str, Any]] = {}

    def __fspath__(self) -> str:
        return self.folder

    def add_tensors(self, file: str, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
        """Add a file of tensors in safetensors' format, with options of `formats.write_safetensors`."""
        self._jobs[file] = (formats.write_safetensors, dict(tensors), options)

    def add_object(self, file: str, obj: Any) -> None:
        """Add a file in torch's format."""
        self._jobs[file] = (formats.write_torch, obj, {})

    def add_bytes(self, file: str, data: bytes) -> None:
        """Add a file that is its bytes."""
        self._jobs[file] = (formats.write_bytes, data, {})

    def add_shards(self, name: str, state: dict[str, Any]) -> None:
        """Add a folder of shards, in torch's sharded format: all ranks add it, and write it together. All ranks."""
        self._shards[name] = state

    def replace(self, change: Callable[[Any], Any]) -> None:
        """Replace the content of each file, and each state of shards, by what a function returns for it."""
        self._jobs = {file: (write, change(obj), options) for file, (write, obj, options) in self._jobs.items()}
        self._shards = {name: change(state) for name, state in self._shards.items()}

    def write(self, writers: int = WRITERS, group: Any = None) -> dict[str, FileEntry]:
        """Write the files durably, `writers` at a time; return the entries. All ranks of `group` if any has shards.

        An interpreter that is about to exit starts no more threads, so what may run then takes one writer.
        """
        entries: dict[str, FileEntry] = {}
        for name, state in self._shards.items():
            from accelerate.checkpoint import shards  # here: with torch's planner

            written = shards.save(state, os.path.join(self.folder, name), group, create=self._create_in(name))
            entries |= {f"{name}/{file}": entry for file, entry in written.items()}

        def one(file: str) -> FileEntry:
            write, obj, options = self._jobs[file]
            return write(file, obj, rank=self.rank, create=self.create, **options)

        # In the order in which they were added: models and optimizers come first, so that the small ones fill the gaps.
        return {**entries, **dict(zip(self._jobs, durable.each(one, self._jobs, writers), strict=True))}

    def _create_in(self, folder: str) -> formats.Create:
        return lambda path: self.create(f"{folder}/{os.path.basename(path)}")


# -- what is put into it -----------------------------------------------------------------------------------------------


def writes(save_on_each_node: bool = False) -> bool:
    """Say whether this process writes the shared files, of the run or of its node."""
    state = PartialState()
    return state.is_local_main_process if save_on_each_node else state.is_main_process


@contextlib.contextmanager
def planned(folder: durable.Path, save_on_each_node: bool = False) -> Iterator[SavePlan]:
    """Give the plan that takes files: the caller's, or one for a plain folder, written when the block ends."""
    if isinstance(folder, SavePlan):
        yield folder
    else:
        plan = SavePlan(os.fspath(folder), writes_shared=writes(save_on_each_node))
        yield plan
        plan.write()


def plain_names(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict, and the versions of modules in it, without what torch.compile puts into names."""

    def plain(name: str) -> str:
        return f"{name}.".replace("_orig_mod.", "").removesuffix(".")

    state = OrderedDict((plain(name), value) for name, value in state_dict.items())
    if hasattr(state_dict, "_metadata"):
        # The entry of a compiled wrapper itself gives way to that of the module inside, which follows it.
        state._metadata = OrderedDict((plain(name), version) for name, version in state_dict._metadata.items())
    return state


def write_model(
    state_dict: Mapping[str, Any],
    folder: durable.Path,
    index: int = 0,
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """Write the state dict of model number `index`; ValueError names a value that safetensors lacks. All ranks."""
    file = manifest.model_file(index, safe_serialization)
    with planned(folder, save_on_each_node) as plan:
        if not plan.writes_shared:
            return
        if safe_serialization:
            state = clean_state_dict_for_safetensors(state_dict)
            plan.add_tensors(file, state, metadata={"format": "pt"}, aliases=same_tensors(state_dict))
        else:
            plan.add_object(file, state_dict)
    if plan is not folder:
        # Of an earlier save in the other format; a reader would not know which of the two is newer.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, manifest.model_file(index, not safe_serialization)))


def write_optimizer(state: Any, folder: durable.Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of optimizer number `index`. All ranks call it, one process writes."""
    with planned(folder, save_on_each_node) as plan:
        if plan.writes_shared:
            plan.add_object(manifest.optimizer_file(index), state)


def write_common(common: Common, folder: durable.Path, step: int, save_on_each_node: bool = False) -> None:
    """Write what every strategy saves alike. All ranks call it: one writes what is shared, and each its own."""
    shared = {file: obj.state_dict() for obj, file, _ in common.shared()}
    loaders = common.loaders()
    # Ranks stand at different places of their data.
    positions = [resume.capture(loader) if isinstance(loader, PreparedLoader) else None for loader in loaders]
    with planned(folder, save_on_each_node) as plan:
        for file, state in shared.items() if plan.writes_shared else ():
            plan.add_object(file, state)
        own = {"step": step, **resume.collect_generators(common.device), POSITIONS: positions}
        for index, loader in enumerate(loaders):
            if keeps_state(loader):
                state = {name: value for name, value in loader.state_dict().items() if name != resume.KEY}
                # The writer of shared files leaves its states in files of their own, which other programs and new ranks read.
                if plan.writes_shared:
                    plan.add_object(manifest.dataloader_file(index), state)
                else:
                    own.setdefault(LOADERS, {})[index] = state
        plan.add_object(manifest.random_states_file(common.process_index), own)


# -- the saving of one checkpoint ----------------------------------------------------------------------------------------


@dataclass
class Save:
    """The saving of one checkpoint. Each rank makes one and goes through the same steps.

    Attributes:
        facts: What the manifest says of the run.
        refusing: Called with the storage by the leader before it stages; raises where the storage must not be taken.
        rotating: Called with the storage by the rank that published, once all ranks know that the checkpoint is there.
        shards: The process group of the ranks that write shards together; None for the default one.
        plan: What takes the files of this rank; from `begin` on.
        problem: Why this rank cannot go on; the next step of all ranks reports it.
    """

    storage: CheckpointStorage
    group: Group
    facts: dict[str, Any]
    refusing: Callable[[CheckpointStorage], Any] = lambda storage: None
    rotating: Callable[[CheckpointStorage], Any] = lambda storage: None
    shards: Any = None
    plan: SavePlan | None = field(default=None, init=False)
    problem: BaseException | None = field(default=None, init=False)
    _leader: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.barrier = SaveBarrier("save_state", self.storage.location, self.group, default_store())

    def begin(self, former: BaseException | None = None) -> None:
        """Meet the other ranks, and learn where to write; a `former` problem of a rank is raised, nothing saved.

        CollectiveMisuse if the others do something else; RuntimeError if another rank could not make the folder.
        """
        self.barrier.begin()
        self._leader = self.barrier.leader()
        self.problem = former
        folder = self._meet(self.barrier.share, self._attempt(self._stage) if self._leads else None, self._leader)
        if not self.group.shared and not self.group.each_node:  # machines stage apart what one of them publishes
            self.storage.generation = self._meet(self.barrier.share, self.storage.generation)
        first = (self.group.local_rank if self.group.each_node else self.group.rank) == 0
        self.plan = SavePlan(folder, self.group.rank, first, partial(self.storage.create, folder))

    @property
    def _leads(self) -> bool:
        return self._leader == self.group.rank

    @property
    def _publishes(self) -> bool:
        return self.group.rank == (self._leader if self.group.each_node else 0)

    def settle(self) -> None:
        """Learn whether all ranks could collect their state, before the rest is done in the background. All ranks."""
        self._meet(self.barrier.share)

    def finish(self, writers: int = WRITERS) -> None:
        """Write this rank's files, and publish the checkpoint when every rank has. May run in a thread.

        The error of this rank is raised as it is, that of another one as a RuntimeError.
        """
        own = self._attempt(lambda: self.plan.write(writers, self.shards)) or {}
        if own and not self._leads:
            self._attempt(lambda: manifest.write_part(self.plan.folder, self.group.rank, own))
        written = self._meet(self.barrier.count_of, bool(own) and not self._leads)
        listed = self._attempt(lambda: self._complete(own, writers)) if self._leads else None
        if not self.group.shared:  # several ranks lead, and none publishes if one of them has failed
            written += self._meet(self.barrier.count_of, bool(own) and self._leads and not self._publishes)
        if self._publishes:
            self._attempt(lambda: self._publish(own, listed, written))
        self._meet(self.barrier.share)
        self.barrier.leave()
        if self._publishes:  # the checkpoint is saved on all ranks, whatever becomes of older ones
            self.rotating(self.storage)

    def _attempt(self, step: Callable[[], Any]) -> Any:
        """Take a step, unless this rank has failed before; the next meeting of all ranks reports what it raises."""
        try:
            return step() if self.problem is None else None
        except BaseException as error:  # a rank that leaves without a word is waited for
            self.problem = error

    def _meet(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Take a step of the barrier with all ranks, unless one of them has failed: then nothing is saved."""
        try:
            return step(*arguments, problem=self.problem)
        except BaseException:
            if self._leads:
                self.storage.abandon()
            raise

    def _stage(self) -> str:
        self.refusing(self.storage)
        refuse_unreadable(self.storage.location)
        return self.storage.stage()

    def _complete(self, own: dict[str, FileEntry], threads: int) -> dict[str, FileEntry]:
        """Add what hooks and strategies wrote by themselves to this rank's files, and upload the folder; return what other ranks list."""
        folder, ranks = self.plan.folder, range(self.group.world_size)
        listed = manifest.gathered(manifest.parts(folder, ranks))
        own |= unlisted(folder, {*own, *listed}, self.group.rank, threads)
        if own and not self._publishes:
            manifest.write_part(folder, self.group.rank, own)
        self.storage.upload(folder)
        return listed

    def _publish(self, own: dict[str, FileEntry], listed: dict[str, FileEntry], written: int) -> None:
        if not self.storage.shared:  # other nodes have uploaded theirs
            listed = manifest.gathered(self.storage.parts(range(self.group.world_size)))
        seen = sum(name.startswith(f"{manifest.PARTS_FOLDER}/") for name in listed)
        if not self.group.each_node and seen != written:
            raise OSError(
                f"Of the {written} parts of its manifest {seen} can be seen in {self.plan.folder!r}: the file system does not show "
                "what other nodes have written there. Save to another one."
            )
        Manifest({**own, **listed}, save=self.barrier.name, **self.facts).write(self.plan.folder)
        self.storage.publish()


def unlisted(folder: str, known: Iterable[str], rank: int, threads: int = 1) -> dict[str, FileEntry]:
    """Return entries of the files in a staged folder that no rank has listed. One process per folder."""
    names = sorted(manifest.files_below(folder).keys() - {*known, manifest.NAME})
    if bad := [name for name in names if not durable.is_inside(name)]:
        raise ValueError(
            f"The file {bad[0]!r} cannot be part of a checkpoint: not every system can have a file of that name. Let the "
            "hook that writes it choose a name without a backslash, and without a colon behind one letter."
        )
    return {name: formats.describe(os.path.join(folder, name), rank, threads) for name in names}
