"""One checkpoint and the ranks that take part in it: who stages, who writes what, who publishes, and what is verified."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.checkpoint import formats, manifest
from accelerate.checkpoint.barrier import CollectiveBarrier, SaveBarrier, default_store
from accelerate.checkpoint.manifest import FileEntry, Manifest
from accelerate.checkpoint.plan import WRITERS, SavePlan
from accelerate.checkpoint.storage import CheckpointStorage
from accelerate.runtime import durable

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator


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
    def of(cls, accelerator: "Accelerator", place: CheckpointStorage) -> "Group":
        """Return the group of an Accelerator.

        Args:
            accelerator: The Accelerator.
            place: Where the checkpoint is.
        """
        # A place that is no file system is the same for all nodes.
        each_node = accelerator.project_configuration.save_on_each_node and place.shared
        return cls(
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.local_process_index,
            # Where no launcher tells it, each rank looks after itself.
            int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
            each_node,
            place.shared and not each_node,
        )

    @property
    def leader(self) -> int:
        """The rank that stages the folder that this one writes to."""
        return 0 if self.shared else self.rank - self.local_rank

    @property
    def leads(self) -> bool:
        """Whether that is this rank."""
        return self.rank == self.leader

    def among(self, ranks: list[int], leader: int) -> tuple[int, bool]:
        """Return the rank that stages for this one if only some ranks save, and whether this rank publishes.

        Args:
            ranks: those that save, in ascending order.
            leader: the rank that stages for this one when all do.
        """
        leader = leader if leader in ranks else ranks[0]
        return leader, self.rank == (leader if self.each_node else ranks[0])

    def barrier(self, kind: str, place: CheckpointStorage) -> SaveBarrier:
        """Return the barrier of these ranks.

        Args:
            kind: ``"save_state"`` or ``"load_state"``.
            place: Where the checkpoint is.
        """
        store = default_store()
        if store is None and self.world_size > 1:
            return CollectiveBarrier(kind, place.location, self.rank, self.world_size)
        apart = self.local_world_size if self.each_node else None
        made = SaveBarrier(kind, place.location, self.rank, self.world_size, store, apart)
        made.local_rank = None if self.shared else self.local_rank
        return made


class Save:
    """The saving of one checkpoint. Each rank makes one and goes through the same steps.

    Args:
        place: Where the checkpoint goes.
        group: The ranks.
        facts: What the manifest says of the run.
        refusing: Called with the place by the leader before it stages; raises where the place must not be taken.
        rotating: Called with the place by the rank that published, once the checkpoint is there.
    """

    def __init__(
        self,
        place: CheckpointStorage,
        group: Group,
        facts: dict[str, Any],
        refusing: Callable[[CheckpointStorage], Any] | None = None,
        rotating: Callable[[CheckpointStorage], Any] | None = None,
    ) -> None:
        self.place = place
        self.group = group
        self.facts = facts
        self.rotating = rotating
        # The process group of the ranks that write shards together; None for the default one.
        self.shards: Any = None
        self.refusing = refusing
        self.barrier = group.barrier("save_state", place)
        self._plan: SavePlan | None = None
        self._problem: BaseException | None = None
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
        self._leader, self._publishes = self.group.among(self.barrier.ranks, self.barrier.leader(self.group.leader))
        staged, problem = None, former
        if self._leads and former is None:
            try:
                if self.refusing is not None:
                    self.refusing(self.place)
                staged = self.place.stage(self.barrier.name)
            except BaseException as error:  # a rank that leaves without a word is waited for
                problem = error
        told = {"staged": staged, "problem": _text(problem), "generation": self.place.generation}
        try:
            notes = self.barrier.exchange(told)
            if any(note["problem"] for note in notes):
                self.barrier.end(problem)
        except BaseException:
            self._abandon()
            raise
        if self._leads and notes[0]["generation"]:
            self.place.join(notes[0]["generation"])
        staged = dict(zip(self.barrier.ranks, notes, strict=True))[self._leader]["staged"]
        self._plan = SavePlan(staged, self.group.rank)

    @property
    def _leads(self) -> bool:
        return self._leader == self.group.rank

    def plan(self) -> SavePlan:
        """Return what takes the files of this rank."""
        return self._plan

    def fail(self, problem: BaseException) -> None:
        """Remember that this rank could not collect its state; `finish` tells the others.

        Args:
            problem: why.
        """
        self._problem = problem

    def settle(self) -> None:
        """Learn whether all ranks could collect their state; before the rest is done in the background. All ranks.

        Raises:
            RuntimeError: another rank could not; this one's own error is raised as it is.
        """
        try:
            self.barrier.check(self._problem)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._leads:
            self.place.abandon()

    def finish(self, writers: int = WRITERS) -> None:
        """Write this rank's files, and publish the checkpoint when every rank has. May run in a thread.

        Args:
            writers: files that are written at a time.

        Raises:
            RuntimeError: another rank failed; this one's own error is raised as it is.
        """
        try:
            self._finish(writers)
        except BaseException as error:
            self._abandon()
            if self._problem is not None and error is not self._problem:
                raise self._problem from error  # what comes of it tells less
            raise

    def _finish(self, writers: int) -> None:
        entries: dict[str, FileEntry] = {}
        if self._problem is None:
            try:
                entries = self._plan.write(writers, self.shards)
            except BaseException as error:
                self._problem = error
        notes = self._tell(entries)
        if not any(note["problem"] for note in notes) and self._leads:
            # The folder has what all ranks of this file system wrote, and what hooks and strategies wrote by themselves.
            mine = [note for note in notes if note["leader"] == self.group.rank]
            entries = merged(mine)
            try:
                entries |= unlisted(self._plan.folder, entries, self.group.rank, writers)
                if not self.place.shared:
                    self.place.upload(self._plan.folder)
            except BaseException as error:
                self._problem = error
        notes = self._tell(entries if self._leads else {})
        self.barrier.end(self._problem, act=lambda: self._publish(notes), presiding=self._publishes)

    def _tell(self, entries: dict[str, FileEntry]) -> list[dict[str, Any]]:
        told = {name: entry.to_json() for name, entry in entries.items()}
        self.barrier.failed = self._problem is not None
        return self.barrier.exchange({"leader": self._leader, "files": told, "problem": _text(self._problem)})

    def _publish(self, notes: list[dict[str, Any]]) -> None:
        if self.group.each_node:
            notes = [note for note in notes if note["leader"] == self.group.rank]
        Manifest(merged(notes), save=self.barrier.name, **self.facts).write(self._plan.folder)
        self.place.publish()
        if self.rotating is not None:
            self.rotating(self.place)


def _text(problem: BaseException | None) -> str:
    return "" if problem is None else f"{type(problem).__name__}: {problem}"


def merged(notes: Iterable[dict[str, Any]]) -> dict[str, FileEntry]:
    """Return the files that several ranks told of.

    Args:
        notes: of `Save`.
    """
    return {name: FileEntry.told_by_rank(told) for note in notes for name, told in note["files"].items()}


def unlisted(folder: str, known: Iterable[str], rank: int, threads: int = 1) -> dict[str, FileEntry]:
    """Return entries of the files in a folder that nobody has told of. One process per folder.

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
