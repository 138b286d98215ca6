"""Loading a run's checkpoint: choose it, verify its files, read all states and compare them with the objects, and only then apply them.

Rank 0 chooses the checkpoint; where machines have separate disks, one rank of each looks at its copy. The ranks meet after every phase, and
all of them raise the worst problem of any. No object changes before all ranks have read everything.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate.base._warn import warn_user
from accelerate.checkpoint import manifest
from accelerate.checkpoint.apply import Contents
from accelerate.checkpoint.choose import Choice, Search, TryNext, own_copy, refused
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest, damaged
from accelerate.checkpoint.ranks import Group, Problem, Ranks, default_store
from accelerate.checkpoint.read import read, tensor_device
from accelerate.checkpoint.state import Common
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, storage_of
from accelerate.checkpoint.verify import CheckpointFolder, verify
from accelerate.runtime.run import Run
from accelerate.training import gradients
from accelerate.training.run import TrainingRun

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]
T = TypeVar("T")

# How often a load starts over because another save has taken the place of the checkpoint that it was reading.
_ATTEMPTS = 100


def load_state(
    accelerator: TrainingRun,
    input_dir: Folder | None,
    load_kwargs: dict[str, Any] | None,
    latest: bool,
    missing_ok: bool,
    **model_options: Any,
) -> Path | str | None:
    """Load what ``save_state`` saved into everything prepared or registered.

    The checkpoint is verified, read in full and compared with the objects before any of them is changed. If one of
    them refuses its state all the same, on any rank, all are given back what they had. Where another save takes its
    place meanwhile, all ranks start over with that one, so that they never mix two.

    Collective: call on every rank.
    """
    location = tensor_device(model_options.pop("map_location", None), accelerator.device)
    options = {"map_location": location, "load_kwargs": load_kwargs, "model_options": model_options}
    search = Search(accelerator, _storage(accelerator, input_dir), latest or input_dir is None)
    return _load(accelerator, search, options, missing_ok)


def _load(accelerator: TrainingRun, search: Search, options: dict[str, Any], missing_ok: bool) -> Path | str | None:
    location, replaced = search.storage.location, 0
    while True:
        ranks = Ranks(Group.of(accelerator, search.storage), default_store())
        ranks.agree("load_state", search.storage.unresolved)
        if (choice := _choose(search, ranks, accelerator.extensions.former_problem, missing_ok)) is None:
            return None
        try:
            contents = _load_chosen(accelerator, ranks, choice, options)
        except TryNext as problem:
            problem.__traceback__ = None  # its frames would keep what was read until garbage is collected
            if not problem.replaced and not search.latest:
                raise damaged(choice.storage.location, problem.reasons) from None
            if not problem.replaced:
                search.pass_over(choice, problem.reasons)
                continue
        else:
            return _finish(accelerator, choice, contents)
        replaced += 1
        logger.info("%r: another save took its place while it was read; starting over.", location)
        if replaced == _ATTEMPTS:
            raise RuntimeError(
                f"load_state({location!r}): another save took its place {replaced} times while it was read; nothing was "
                "loaded. Save there less often, or load a copy."
            )
        time.sleep(replaced / 1000)


def _load_chosen(accelerator: TrainingRun, ranks: Ranks, choice: Choice, options: dict[str, Any]) -> Contents:
    """Verify, read and apply a checkpoint; after an error all objects have what they had, unless `Contents.complete` has failed.

    Collective: call on every rank.

    Raises:
        TryNext: The checkpoint is damaged, or another save has taken its place.
    """
    contents = Contents(
        choice.folder, Common.of(accelerator, accelerator._state_io.checkpointed_schedulers(accelerator))
    )

    def verify_files() -> None:
        by_shards = accelerator._state_io.saves_shards
        if lines := choice.problems or verify(choice.folder, accelerator.process_index, by_shards):
            raise TryNext(lines)

    try:
        _together(ranks, verify_files, choice)
        # Before any rank gives its objects anything: they may call collectives.
        _together(ranks, partial(read, accelerator, contents, options), choice)
        _together(ranks, contents.begin)
        _together(ranks, contents.complete)  # no rank may continue while another has other states
        ranks.leave()
        return contents
    finally:
        contents.undo()  # also without `begin`: hooks of the user may have changed models
        choice.storage.release()


# The levels of problems in `_together`: an interrupt ends the load on all ranks, a checkpoint that is gone is not damaged, and a
# rank may fail because another one finds the checkpoint damaged.
_FAILED, _DAMAGED, _REPLACED, _INTERRUPTED = 1, 2, 3, 4


def _together(ranks: Ranks, phase: Callable[[], Any], choice: Choice | None = None) -> None:
    """Do a phase of the load, and raise the worst problem of all ranks: that of this rank if none is worse.

    Pass the `choice` for a phase that reads its files.

    Collective: call on every rank.
    """
    _, error = _attempted(phase)
    if choice is not None:
        error = choice.judged(error)
    problem = None
    if isinstance(error, TryNext):
        problem = Problem(_REPLACED if error.replaced else _DAMAGED, DamagedCheckpoint(str(error)))
    elif error is not None:
        problem = Problem(_FAILED if isinstance(error, Exception) else _INTERRUPTED, error)
    worst, lost = _attempted(partial(ranks.worst, problem))
    if lost is not None:  # a rank, or the store
        raise lost if error is None or isinstance(error, TryNext) else error
    if worst is None or worst is problem:
        if error is not None:
            raise error
    elif worst.level == _REPLACED:
        raise TryNext(["another save took its place"], replaced=True)
    else:
        raise TryNext(worst.lines) if worst.level == _DAMAGED else worst.error


def _attempted(step: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Take a step; return its result, or its error: other ranks would wait for a rank that leaves before they know."""
    try:
        return step(), None
    except BaseException as error:
        return None, error


def _storage(accelerator: TrainingRun, input_dir: Folder | None) -> CheckpointStorage:
    project = accelerator.project_configuration
    if input_dir is not None:
        return storage_of(input_dir)
    if project.project_dir is None:
        raise ValueError(
            "load_state() got no input_dir, and the Accelerator has no project folder to look in. Pass the checkpoint, or "
            "Accelerator(project_config=ProjectConfiguration(project_dir))."
        )
    return storage_of(os.path.join(project.project_dir, manifest.CHECKPOINTS_FOLDER))


def _choose(search: Search, ranks: Ranks, problem: BaseException | None, missing_ok: bool) -> Choice | None:
    """Return the checkpoint that rank 0 has found, on the disk of this rank's machine; None if there is none.

    The former `problem` of a rank is raised on all of them.

    Collective: call on every rank.
    """
    group = ranks.group
    answer, error = _attempted(search.answer) if group.rank == 0 and problem is None else (None, problem)
    answer = ranks.share(answer, error=error)
    if (refusal := refused(answer)) is not None:
        ranks.leave()
        # A checkpoint that cannot be read is no reason to start again, and to save over it.
        if missing_ok and answer["nothing"]:
            logger.info("%s Nothing was loaded.", refusal)
            return None
        raise refusal
    location = answer["location"]
    if group.each_node:  # machines with separate checkpoints may have separate paths
        location = search.storage.child(answer["child"]).location if answer["child"] else search.storage.location
    storage, problems = storage_of(location), list[str]()
    path, save, following = answer["folder"], answer["save"], answer["following"]
    listing = search.listing if group.one_folder else None
    leader = ranks.leader()
    if not group.one_folder:
        shared = None
        if group.rank == leader:
            copied, error = _attempted(lambda: own_copy(storage, save))
            if copied is not None:
                path, save, problems, listing = copied
                shared = [path, save, (storage.fetched or ("", ""))[1]]
        path, save, generation = ranks.share(shared, leader, error)
        storage.fetched = path, generation
    if group.each_node and following is not None:  # a machine may have one more
        number, error = _attempted(lambda: search.following_number(storage)) if group.rank == leader else (0, None)
        following = -ranks.smallest(-(number or 0), error)
    with contextlib.suppress(OSError, DamagedCheckpoint):  # there is none, or another save takes the place
        listing = listing or Manifest.read(path)
    folder = CheckpointFolder(path, listing or Manifest({}), _local_rank_and_size(search.run), storage.bring)
    return Choice(storage, folder, save, problems, following)


def _local_rank_and_size(run: Run) -> tuple[int, int]:
    """Return which rank of its machine this one is, and how many they are, as far as the launcher told."""
    count = min(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), run.num_processes)
    rank = run.local_process_index
    return (rank, count) if rank < count else (0, 1)


def _finish(accelerator: TrainingRun, choice: Choice, contents: Contents) -> Path | str:
    """Let the Accelerator take over what belongs to it, and warn of what was not restored; return what was loaded."""
    location = choice.storage.location
    for name, value in contents.attributes.items():
        setattr(accelerator, name, value)
    if accelerator._window.micro_batches:
        gradients.reset(accelerator)
    accelerator._loaded_checkpoint = location
    if accelerator.process_index == 0 and contents.unclaimed:
        warn_user(
            f"load_state({location!r}) did not restore {', '.join(contents.unclaimed)}: no object is prepared for these states of the "
            "checkpoint. To resume training, prepare the objects that were saved, in the same order, before `load_state`; an "
            "evaluation may ignore this."
        )
    for line in contents.changed_schedules if accelerator.process_index == 0 else ():
        warn_user(f"load_state({location!r}), {line}")
    if choice.following is not None:
        accelerator.project_configuration.iteration = choice.following
    return Path(location) if isinstance(choice.storage, LocalStorage) else location
