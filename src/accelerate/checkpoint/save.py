"""Saving a checkpoint: each rank collects its files, all ranks write them, and one rank publishes the checkpoint.

A rank collects its files in a `SavePlan`. It is path-like, so that strategies which write by themselves write into its folder. What is
put into it instead is hashed while it is written, and can be copied and written in a thread.
"""

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from accelerate.checkpoint import apply, formats, manifest, plain_data
from accelerate.checkpoint.manifest import FileEntry, Manifest
from accelerate.checkpoint.ranks import Group, Ranks, default_store
from accelerate.checkpoint.state import LOADERS, POSITIONS, Common, keeps_state
from accelerate.checkpoint.storage import CheckpointStorage
from accelerate.data import resume
from accelerate.data.loader import PreparedLoader
from accelerate.modules.unwrap import separate_tensors
from accelerate.runtime import durable, generators

logger = logging.getLogger(__name__)

# Large files that are written at a time. Two keep a disk busy while one of them waits for its hash or for the interpreter. For files
# below a size, threads cost more than they gain.
THREADS, _LARGE = 2, 16 << 20

# -- what one rank writes ----------------------------------------------------------------------------------------------


class SavePlan(os.PathLike[str]):
    """Files of one rank for the folder of a checkpoint; `writes_shared`: those too that are the same on all ranks.

    A `storage` gives the files to write to, when it has staged the folder; without one they are written durably, one after the other.
    """

    def __init__(
        self, folder: str, rank: int = 0, writes_shared: bool = True, storage: CheckpointStorage | None = None
    ) -> None:
        self.folder = folder
        self.create: formats.Create = lambda name: durable.durable(os.path.join(folder, name))
        self.sync: Callable[[Iterable[str]], None] = lambda names: None
        if storage is not None:
            self.create, self.sync = partial(storage.create, folder), partial(storage.sync, folder)
        self.rank = rank
        self.writes_shared = writes_shared
        self._jobs: dict[str, tuple[Callable[..., FileEntry], Any, dict[str, Any]]] = {}
        self._shards: dict[str, dict[str, Any]] = {}
        self._written: dict[str, FileEntry] = {}
        self._unsynced: list[str] = []

    def __str__(self) -> str:  # as programs put folders into texts
        return self.folder

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
        """Add a folder of shards, in torch's sharded format: all ranks add it, and write it together.

        Collective: call on every rank.
        """
        self._shards[name] = state

    def replace(self, change: Callable[[Any], Any]) -> None:
        """Replace the content of each file, and each state of shards, by what a function returns for it."""
        self._jobs = {file: (write, change(obj), options) for file, (write, obj, options) in self._jobs.items()}
        self._shards = {name: change(state) for name, state in self._shards.items()}

    def write(self, threads: int = THREADS, group: Any = None) -> dict[str, FileEntry]:
        """Write the files durably, `threads` at a time; return the entries. All ranks of `group` if any has shards.

        A second call writes what was added since. An interpreter that is about to exit starts no more threads, so it takes one writer.
        """
        states, self._shards = self._shards, {}
        for name, state in states.items():
            from accelerate.checkpoint import dcp  # here: with torch's planner

            create = partial(self._create_shard, name)
            written = dcp.save(state, os.path.join(self.folder, name), group, create=create)
            self._written |= {f"{name}/{file}": entry for file, entry in written.items()}
            self._unsynced += [f"{name}/{file}" for file in written]

        # In the order in which they were added: models and optimizers come first, so that the small ones fill the gaps.
        durable.each(self.write_file, list(self._jobs), threads if self._has_large_files() else 1)
        self.sync(self._unsynced)
        self._unsynced.clear()
        return self._written

    def write_file(self, file: str) -> None:
        """Write one of the files durably, before the others. Not a collective."""
        write, obj, options = self._jobs.pop(file)
        self._written[file] = write(file, obj, rank=self.rank, create=self.create, **options)
        self._unsynced.append(file)

    def forget(self, file: str) -> None:
        """Leave a file that was written, and that other code has changed since, to the leader, which hashes what no rank lists."""
        self._written.pop(file)
        self._unsynced = [name for name in self._unsynced if name != file]

    @property
    def has_shards(self) -> bool:
        """Whether there are shards to be written."""
        return bool(self._shards)

    def contents(self) -> dict[str, Any]:
        """Return what each file, and each folder of shards, is to hold."""
        return {file: obj for file, (_, obj, _) in self._jobs.items()} | self._shards

    def _create_shard(self, folder: str, path: durable.Path) -> Any:
        return self.create(f"{folder}/{os.path.basename(path)}")

    def _has_large_files(self) -> bool:
        """Return whether the tensors directly in the object of one file are large."""
        for _, obj, _ in self._jobs.values():
            size = 0
            for value in obj.values() if isinstance(obj, Mapping) else ():
                size += value.nbytes if isinstance(value, torch.Tensor) else 0
            if size > _LARGE:
                return True
        return False


# -- what is put into it -----------------------------------------------------------------------------------------------


def plain_names(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict, and the versions of modules in it, without what torch.compile puts into names."""
    plain: OrderedDict[str, Any] = OrderedDict()
    versions: OrderedDict[str, Any] = OrderedDict()
    # The entry of a compiled wrapper itself gives way to that of the module inside, which follows it.
    for target, named in ((plain, state_dict), (versions, getattr(state_dict, "_metadata", {}))):
        for name, value in named.items():
            target[f"{name}.".replace("_orig_mod.", "").removesuffix(".")] = value
    if hasattr(state_dict, "_metadata"):
        vars(plain)["_metadata"] = versions
    return plain


def add_model(state_dict: Mapping[str, Any], plan: SavePlan, index: int = 0, safe_serialization: bool = True) -> None:
    """Add the state dict of model number `index` to a plan; ValueError names a value that safetensors lacks.

    Not a collective.
    """
    file = manifest.model_file(index, safe_serialization)
    if plan.writes_shared and safe_serialization:
        tensors, aliases = separate_tensors(state_dict)
        plan.add_tensors(file, tensors, metadata={"format": "pt"}, aliases=aliases)
    elif plan.writes_shared:
        plain_data.refuse_unreadable({f"model {index} ({file})": state_dict})
        plan.add_object(file, state_dict)


def add_optimizer(state: Any, plan: SavePlan, index: int = 0) -> None:
    """Add the state of optimizer number `index` to a plan. Not a collective."""
    if plan.writes_shared:
        plain_data.refuse_unreadable({f"optimizer {index}": state})
        plan.add_object(manifest.optimizer_file(index), state)


def add_common(common: Common, plan: SavePlan, step: int) -> None:
    """Add what every strategy saves to a plan: on one rank what is shared, and on each its own. Not a collective."""
    common_states: dict[str, Any] = {}  # by file
    owners: dict[str, Any] = {}  # by what an error calls them
    for obj, file, _ in common.shared():
        common_states[file] = owners[f"{type(obj).__name__} ({file})"] = obj.state_dict()
    # Ranks are at different positions of their data.
    positions: list[Any] = []
    states: dict[int, dict[str, Any]] = {}
    for index, loader in enumerate(common.loaders()):
        positions.append(resume.capture(loader) if isinstance(loader, PreparedLoader) else None)
        if keeps_state(loader):
            states[index] = {name: value for name, value in loader.state_dict().items() if name != resume.KEY}
        owners[f"data loader {index}"] = positions[index], states.get(index)
    plain_data.refuse_unreadable(owners)
    own = {
        "step": step,
        **generators.collect(common.device),
        POSITIONS: positions,
        apply.SCHEDULE_UNITS: apply.schedule_units(common),
    }
    if plan.writes_shared:
        # The states of loaders are in separate files, which other programs and new ranks read.
        common_states |= {manifest.dataloader_file(index): state for index, state in states.items()}
        for file, state in common_states.items():
            plan.add_object(file, state)
    elif states:
        own[LOADERS] = states
    plan.add_object(manifest.random_states_file(common.process_index), own)


# -- the saving of one checkpoint ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Save:
    """The saving of one checkpoint, in three steps of all ranks: `begin`, `check_collected`, `finish`.

    Between `begin` and the next step a rank puts its files into the `plan`. A rank that fails keeps its `problem`, goes to the next
    exchange with the others, and all raise it there. Nothing is published then, and what was staged is removed.

    The rounds of all ranks are::

        begin            every rank has made this call, with the same path
                         the leader's staged folder, or why it could not be made
        check_collected  whether every rank has its state in the plan, for saves in the background and of shards
        finish           object stores: whether every rank has written, so that leaders upload the files of hooks
                         how many ranks left a part of the manifest, or which could not write
                         `each_node`: whether every publishing rank has listed its files
                         whether the checkpoint is published

    The roles are::

        stages               `stages`: rank 0, or the first rank of each machine where not all ranks see one folder
        publishes            `publishes`: rank 0, or with `each_node` the first rank of each machine
        writes common files  `plan.writes_shared`: the first rank of the run, or with `each_node` of the node

    Attributes:
        manifest_fields: What the manifest says of the run.
        check_target: Called with the storage by the leader before it stages; raises where the storage must not be taken.
        prune_old: Called with the storage by the rank that published, once all ranks know that the checkpoint is there.
        kind: The call, as errors name it.
        shards_group: The process group of the ranks that write shards together; None for the default one.
        ranks: The exchanges with the other ranks.
        plan: Takes the files of this rank; from `begin` on.
        problem: Why this rank cannot continue.
        stages: This rank stages; from `begin` on.
    """

    storage: CheckpointStorage
    group: Group
    manifest_fields: dict[str, Any]
    check_target: Callable[[CheckpointStorage], Any] = lambda storage: None
    prune_old: Callable[[CheckpointStorage], Any] = lambda storage: None
    kind: str = "save_state"
    shards_group: Any = field(default=None, init=False)
    ranks: Ranks = field(init=False)
    plan: SavePlan = field(init=False)
    problem: BaseException | None = field(default=None, init=False)
    stages: bool = field(default=False, init=False)
    publishes: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.ranks = Ranks(self.group, default_store())

    def run_step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, unless this rank has failed before; the next exchange of all ranks reports what it raises."""
        try:
            return step(*arguments) if self.problem is None else None
        except BaseException as error:  # the other ranks would wait for a rank that leaves without a word
            self.problem = error

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        """Remove what this rank has staged if the ranks fail."""
        try:
            yield
        except BaseException:
            if self.publishes:
                self.storage.discard()
            raise

    def begin(self, former: BaseException | None = None) -> None:
        """Stage a folder on each file system, and learn where to write; a `former` problem of a rank is raised instead.

        Collective: call on every rank.

        Raises:
            CollectiveMisuse: Other ranks do something else.
            RuntimeError: Another rank could not make the folder.
        """
        ranks, group, self.problem = self.ranks, self.group, former
        ranks.agree(self.kind, self.storage.unresolved)
        leader = ranks.leader()
        self.stages = group.rank == leader
        self.publishes = group.rank == (leader if group.each_node else 0)
        with self._discarding():
            staged = self.run_step(self._stage) if self.stages else None
            folder = ranks.share(staged, leader, self.problem)
        first = (group.local_rank if group.each_node else group.rank) == 0
        self.plan = SavePlan(folder, group.rank, first, self.storage)

    def _stage(self) -> str:
        self.check_target(self.storage)
        formats.refuse_unreadable(self.storage.location)
        return self.storage.stage(self.ranks.name)

    def check_collected(self) -> None:
        """Learn whether all ranks could collect their state, before shards are written together or a thread does the rest.

        Collective: call on every rank.
        """
        with self._discarding():
            self.ranks.first_error(self.problem)

    def finish(self, threads: int = THREADS) -> None:
        """Write this rank's files, and publish the checkpoint when every rank has. May run in a thread.

        Collective: call on every rank.

        Raises:
            BaseException: The problem of this rank, as it is; that of another rank as a RuntimeError.
        """
        ranks, group, shared = self.ranks, self.group, self.storage.shared
        with self._discarding():
            # Write. A rank that does not publish lists its files in its part of the manifest.
            files: dict[str, FileEntry] = dict(self.run_step(self.plan.write, threads, self.shards_group) or {})
            if not shared:
                # Until here the hooks of other ranks may write into the folder of their machine.
                ranks.first_error(self.problem)
                if self.stages:
                    self.run_step(self._add_unlisted, files, threads)
            leaves_part = bool(files) and not self.publishes
            if leaves_part:
                self.run_step(self._leave_part, files)
            parts = ranks.count(leaves_part, self.problem)  # every rank has written

            # List. The rank that publishes reads the parts, and hashes what hooks have written.
            if self.publishes:
                self.run_step(self._add_listed, files, parts, threads)
            if group.each_node:
                ranks.first_error(self.problem)  # several ranks publish, and none does so if another one has failed

            # Publish.
            if self.publishes:
                self.run_step(self._publish, files)
            ranks.first_error(self.problem)
        ranks.leave()
        # The checkpoint is saved on all ranks, whatever becomes of older ones: none waits for their removal, and none fails with it.
        if self.publishes:
            self.storage.discard()
            self.prune_old(self.storage)

    def _add_unlisted(self, files: dict[str, FileEntry], threads: int) -> None:
        """Add the files in the folder that no rank has listed, which hooks have written."""
        entries = unlisted(self.plan.folder, files, self.group.rank, threads)
        if not self.storage.shared:
            self.plan.sync(entries)
        files |= entries

    def _leave_part(self, files: dict[str, FileEntry]) -> None:
        plan, rank = self.plan, self.group.rank
        manifest.write_part(plan.folder, rank, files, plan.create)
        plan.sync([manifest.part_file(rank)])

    def _add_listed(self, files: dict[str, FileEntry], parts: int, threads: int) -> None:
        """Add the files that the parts of other ranks list, of which there are so many, and in a shared folder those of hooks."""
        if parts:
            # Machines with separate checkpoints have only their own parts, which are not counted.
            expected = 0 if self.group.each_node else parts
            texts = self.storage.parts(self.plan.folder, range(self.group.world_size), expected)
            if expected and len(texts) != expected:
                raise OSError(
                    f"Of the {parts} parts of its manifest {len(texts)} can be seen in {self.plan.folder!r}: the file system does "
                    "not show what other nodes have written there. Save to another one."
                )
            files |= manifest.gathered(texts)
        if self.storage.shared:
            self._add_unlisted(files, threads)

    def _publish(self, files: dict[str, FileEntry]) -> None:
        Manifest(files, save=self.ranks.name, **self.manifest_fields).write(self.plan.folder)
        self.storage.publish()


def unlisted(folder: str, known: Iterable[str], rank: int, threads: int = 1) -> dict[str, FileEntry]:
    """Return entries of the files in a staged folder that no rank has listed. One process per folder."""
    names = sorted(manifest.files_below(folder) - {*known, manifest.NAME})
    if bad := [name for name in names if not durable.is_inside(name)]:
        raise ValueError(
            f"The file {bad[0]!r} cannot be part of a checkpoint: not every system can have a file of that name. Let the "
            "hook that writes it choose a name without a backslash, and without a colon behind one letter."
        )
    return {name: formats.describe(os.path.join(folder, name), rank, threads) for name in names}
