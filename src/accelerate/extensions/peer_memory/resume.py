"""Resuming from copies in memory, else from the disk."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.base._warn import warn_user
from accelerate.checkpoint.choose import Choice, Search, TryNext
from accelerate.checkpoint.manifest import CHECKPOINTS_FOLDER, DamagedCheckpoint, Manifest
from accelerate.checkpoint.ranks import Group, Ranks, default_store
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, storage_of
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.extensions.peer_memory.copies import PeerMemory
from accelerate.extensions.peer_memory.folder import Copy, Incoming, choices, exchange
from accelerate.training import restoring

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Resumed:
    """What a run resumed from.

    Attributes:
        source: The ``"memory"`` of each machine, that of a ``"peer"`` for some machine, or the ``"disk"``.
        steps: Optimizer steps before the copy or checkpoint; None if the checkpoint does not have them.
        location: The folder or URL.
    """

    source: Literal["memory", "peer", "disk"]
    steps: int | None
    location: str


def resume_from_memory(accelerator: Any, checkpoint_dir: Folder | None = None) -> Resumed | None:
    """Resume from the newest copy in memory of which every rank's part is left, else from the newest checkpoint on the disk.

    Call it once, after ``prepare``. A checkpoint that was saved after the copy is loaded instead of it. Copies are compared with their
    checksums, and a damaged one is passed over. Copies of another number of ranks are not read.

    Collective: call on every rank.

    Args:
        checkpoint_dir: A checkpoint, or a folder or URL of checkpoints; None takes those of the project, if there are any.

    Returns:
        What the run resumed from; None where there is neither a copy nor a checkpoint.

    Raises:
        ValueError: The Accelerator has no `PeerMemoryKwargs`.
        DamagedCheckpoint: Neither a copy nor a checkpoint on the disk loads, though there are some.

    Example:
        >>> from accelerate import Accelerator
        >>> from accelerate.extensions.peer_memory.options import PeerMemoryKwargs
        >>> accelerator = Accelerator(cpu=True, kwargs_handlers=[PeerMemoryKwargs(every=50)])
        >>> accelerator.resume_from_memory() is None  # the first start of a run
        True
    """
    if getattr(accelerator, "peer_memory_handler", None) is None:
        raise ValueError(
            "resume_from_memory() needs copies. Pass Accelerator(kwargs_handlers=[PeerMemoryKwargs()]), or call load_state()."
        )
    memory, storage = (
        next(iter(accelerator.extensions.of_kind(PeerMemory)), None),
        _storage(accelerator, checkpoint_dir),
    )
    if memory is not None:
        with accelerator.extensions.phase("load_state"):
            resumed = _from_memory(memory, storage)
        if resumed is not None:
            return resumed
    location = None if storage is None else accelerator.load_state(checkpoint_dir, latest=True, missing_ok=True)
    if location is None:
        return None
    return Resumed("disk", None, str(location)) if memory is None else _resumed(memory, "disk", str(location))


def _resumed(memory: PeerMemory, source: Literal["memory", "peer", "disk"], location: str) -> Resumed:
    memory.cadence.resume_at(memory.loaded_steps or 0)
    return Resumed(source, memory.loaded_steps, location)


def _storage(run: Any, checkpoint_dir: Folder | None) -> CheckpointStorage | None:
    """Return where a run looks for checkpoints on the disk; None without such a place."""
    if checkpoint_dir is not None:
        return storage_of(checkpoint_dir)
    project_dir = run.project_configuration.project_dir
    return None if project_dir is None else storage_of(project_dir).child(CHECKPOINTS_FOLDER)


def _from_memory(memory: PeerMemory, storage: CheckpointStorage | None) -> Resumed | None:
    """Resume from the newest usable copy, unless the newest checkpoint in a storage is newer.

    Collective: call on every rank.
    """
    ranks = memory.ranks
    on_disk = ""
    if ranks.rank == 0 and storage is not None:  # names of saves sort by time
        on_disk = Search(memory.run, storage, latest=True).answer().get("save") or ""
    offers = ranks.gather((_complete_copies(memory) if ranks.leads else [], on_disk))
    copies, on_disk = [offers[ranks.leader(machine)][0] for machine in range(len(ranks.machines))], offers[0][1]
    others = {copy.world_size for of_machine in copies for copy in of_machine} - {ranks.world_size}
    if others and ranks.rank == 0:
        warn_user(
            f"The copies in memory are of {min(others)} ranks, and this run has {ranks.world_size}. Only as many ranks as before "
            "can read them."
        )
    for save, holders in choices(copies, ranks.machines):
        if on_disk > save:
            return None
        try:
            folder = _fetched(memory, save, holders, copies)
        except (OSError, RuntimeError) as error:
            logger.warning("The copy %s in memory cannot be used: %s", save, error)
            continue
        if (listing := _load(memory, folder, save)) is not None:
            memory.complete = save
            _restore_number(memory, listing)
            return _resumed(memory, "memory" if holders == list(range(len(holders))) else "peer", folder)
    return None


def _fetched(memory: PeerMemory, save: str, holders: Sequence[int], copies: Sequence[Sequence[Copy]]) -> str:
    """Return this machine's folder of a copy, which the machine that has it sends where this one lacks it.

    Collective: call on every rank.
    """
    ranks, folder = memory.ranks, memory.folder

    def folder_at(holder: int, machine: int) -> str:
        wanted = save, ranks.machines[machine]
        return next(copy.folder for copy in copies[holder] if (copy.save, copy.ranks) == wanted)

    def send() -> None:
        for machine, holder in enumerate(holders):
            if machine != holder == ranks.machine:
                exchange(ranks.leaders, (folder_at(holder, machine), ranks.leader(machine)), None)
            elif machine != holder and machine == ranks.machine:
                exchange(
                    ranks.leaders, None, Incoming(ranks.leader(holder), folder.partial(folder.local_copies, save))
                )
                folder.publish(folder.local_copies, save)

    ranks.together(send if ranks.leads else lambda: None)
    is_here = holders[ranks.machine] == ranks.machine
    return folder_at(ranks.machine, ranks.machine) if is_here else os.path.join(folder.local_copies, save)


def _load(memory: PeerMemory, folder: str, save: str) -> Manifest | None:
    """Give all objects the states of a copy; return its manifest, or None if it is damaged on some rank.

    Collective: call on every rank.
    """
    run, ranks = memory.run, memory.ranks
    meeting = Ranks(Group(ranks.rank, ranks.world_size, ranks.local_rank, True, False), default_store())
    meeting.agree("resume_from_memory", save)
    listing, problems = Manifest({}), list[str]()
    try:
        listing = Manifest.read(folder)
    except (DamagedCheckpoint, OSError) as error:
        problems.append(str(error))
    readers = ranks.local_rank, len(ranks.machines[ranks.machine])
    choice = Choice(LocalStorage(folder), CheckpointFolder(folder, listing, readers), listing.save, problems, None)
    options = {"map_location": "cpu", "load_kwargs": None, "model_options": {}}
    try:
        contents = restoring._load_chosen(memory.copied_run(), meeting, choice, options)
    except TryNext as problem:
        logger.warning("The copy %s in memory is damaged and is not used: %s", save, "; ".join(problem.reasons))
        return None
    former = run._loaded_checkpoint
    restoring._finish(run, choice, contents)
    run._loaded_checkpoint = former
    return listing


def _complete_copies(memory: PeerMemory) -> list[Copy]:
    """Return the complete copies on this machine; none if they cannot be read, and the run resumes from the disk."""
    try:
        return memory.folder.complete_copies()
    except OSError as error:
        logger.warning("The copies in the memory of this machine cannot be used: %s", error)
        return []


def _restore_number(memory: PeerMemory, listing: Manifest) -> None:
    """Let the next automatic name of a checkpoint follow those on the disk, and those before the copy.

    Collective: call on every rank.
    """
    project, number = memory.run.project_configuration, listing.iteration
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        return

    def look() -> None:
        nonlocal number
        if memory.ranks.leads:
            saved = storage_of(project.project_dir).child(CHECKPOINTS_FOLDER).checkpoints()
            number = max([number, *(1 + taken for taken, entry in saved if not entry.is_empty())])

    memory.ranks.together(look)
    project.iteration = int(memory.ranks.largest(number)[0])
