"""A Trainer's checkpoint is staged, written by the Trainer's own code, and published by one rename.

The Trainer decides what is written, and by which rank: strategies, adapters, tokenizers and callbacks work unchanged. This
module adds the steps around it: the agreement of the ranks, the hidden folder, the manifest, the rename, and later steps.
"""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

import accelerate.comm
from accelerate.checkpoint.manifest import NAME, Manifest
from accelerate.checkpoint.save import Save, SavePlan, unlisted
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, prune
from accelerate.extensions.async_save.background import Background
from accelerate.extensions.async_save.copies import snapshot
from transformers_patch import preempt
from transformers_patch.checkpoints import callbacks, capture, choose, ranks, sharded, streams
from transformers_patch.symbols import shadowed

logger = logging.getLogger(__name__)

# A disk with less than this is full: a file of weights is larger, and the part of it that was written is still there.
_LEAST = 64 << 10


def train(trainer: Any, asked: Any, run: Callable[[Any], Any], in_background: bool = False) -> Any:
    """Train, from the requested checkpoint. Saves in the background are waited for before the best model is loaded, and at the end.

    Args:
        trainer: The Trainer.
        asked: Its `resume_from_checkpoint`.
        run: Calls the Trainer's own method with the folder to resume from.
        in_background: Whether the training continues during saves.

    Returns:
        The result of `run`.
    """
    wait(trainer)
    beside = {_IN_BACKGROUND: in_background or vars(trainer).get(_IN_BACKGROUND, False)}
    engines = shadowed(sys.modules[Trainer.__module__], **sharded.engines(trainer))
    with shadowed(trainer, **sharded.readers(trainer, wait), **beside), engines:
        folder = choose.resolved(trainer, asked)
        begun = ranks.keep(trainer, folder).get("stream") if folder else None
        loader = streams.loader_of(trainer, folder, begun, ranks.together)
        passes = shadowed(trainer, get_train_dataloader=loader, **{streams.STREAM: None})
        with preempt.watching(trainer), passes:
            result = run(folder)
        wait(trainer)
    return result


def wait(trainer: Any) -> None:
    """Wait until the checkpoint that is being saved in the background is published, and push it if requested.

    Collective: call on every rank.

    Raises:
        RuntimeError: It could not be saved.
    """
    callbacks.settle(trainer)
    if (flight := vars(trainer).get(_FLIGHT)) is not None:
        flight.finish()
        flight.push(trainer)


def save_checkpoint(trainer: Any, trial: Any, write: Callable[[], Any]) -> None:
    """Save a Trainer's checkpoint atomically, as `write` writes it.

    During the write, the Trainer's own output folder is a hidden one. It has no other checkpoint, so that the Trainer removes
    none. Pushes to the hub follow the rename, and so do `on_save` and the removal of older checkpoints: callbacks find the
    final folder. In the background a thread writes the copies (see `capture`), syncs all files to the disk and publishes.

    Collective: call on every rank.

    Args:
        trainer: The Trainer.
        trial: That of a hyperparameter search, or None.
        write: Calls the Trainer's own method.

    Raises:
        CollectiveMisuse: Not all ranks save.
        RuntimeError: Another rank failed, or the previous save in the background; an error of this rank is raised unchanged.
            The former checkpoint stays.
    """
    if "_get_output_dir" in vars(trainer):  # an outer call has staged
        write()
        return
    callbacks.settle(trainer)
    run_dir = trainer._get_output_dir(trial=trial)
    place = choose.place_of(run_dir, trainer.state.global_step)
    flight = vars(trainer).setdefault(_FLIGHT, _Flight())
    former = flight.wait("save_checkpoint")
    save = _save_of(trainer, run_dir, place)
    save.begin(former)
    flight.push(trainer)
    staged, goes_on, pushes = save.plan.folder, _goes_on(trainer, save), []
    hidden, rotations = os.path.dirname(staged), callbacks.Rotations(trainer)
    methods = {"_get_output_dir": lambda trial: hidden, "_push_from_checkpoint": pushes.append}
    try:
        with shadowed(trainer, **methods, **sharded.writers(trainer, save.plan)), rotations.postponed():
            stamps = save.run_step(_written, write, save.plan, goes_on)
        flight.pushes = (place,) * len(pushes)
        save.run_step(_settle_state, trainer, run_dir, place, staged)
        if goes_on:
            save.run_step(snapshot, save.plan, flight.buffers)
        save.check_collected()
        save.run_step(capture.look_again, save.plan, stamps)
        if goes_on and save.plan.has_shards and save.group.world_size > 1:
            save.shards_group = accelerate.comm.side_group(beside=True)
        # A subclass may save elsewhere, or nothing.
        holds = save.plan.contents() or save.stages and os.listdir(staged)
        exists = save.ranks.any(bool(holds), save.problem)
        if exists and goes_on:
            save.prune_old = lambda new: _rotate(trainer, run_dir, new)
            flight.start(lambda: save.finish(threads=1), what=place)
            return
        if exists:
            save.finish()
        else:
            save.ranks.leave()
    except BaseException:
        flight.pushes = ()
        flight.buffers.release()
        save.storage.discard()
        raise
    save.storage.discard()  # nothing is left of what has been published
    flight.push(trainer)

    def remove_older() -> None:
        if exists and save.stages:
            _rotate(trainer, run_dir, save.storage, limited=not rotations.calls)
        rotations.run(hidden, run_dir)

    callbacks.expect(trainer, save, remove_older, lambda: preempt.leave_if_due(trainer, place))


class _Flight(Background):
    """The save of a Trainer that may be running, and the push after its publication."""

    pushes: tuple[str, ...] = ()

    def wait(self, reason: str | None = None) -> RuntimeError | None:
        if (problem := super().wait(reason)) is not None:
            self.pushes = ()
        return problem

    def push(self, trainer: Any) -> None:
        """Push what has been published."""
        pushes, self.pushes = self.pushes, ()
        for place in pushes:
            trainer._push_from_checkpoint(place)


# Attributes of a Trainer.
_FLIGHT, _IN_BACKGROUND = "_flight_of_checkpoints", "_saves_in_background"


def _goes_on(trainer: Any, save: Save) -> bool:
    """Return whether the training continues while a checkpoint is hashed and published: not after its last step."""
    asked = vars(trainer).get(_IN_BACKGROUND, False) and not trainer.control.should_training_stop
    if asked and not save.ranks.can_run_in_thread:
        capture.say_once("checkpoints='async' saves at once here: these ranks have no key-value store.")
    reader = capture.reader_among(trainer, TrainerCallback) if asked else None
    if reader is not None:
        capture.say_once(
            f"checkpoints='async' saves at once here: {reader!r} may read or change the files of a checkpoint."
        )
    return bool(asked and save.ranks.can_run_in_thread and reader is None)


def _save_of(trainer: Any, run_dir: str, place: str) -> Save:
    path = os.path.join(os.path.realpath(run_dir), os.path.basename(place))
    storage = LocalStorage(path)
    facts = {"world_size": trainer.args.world_size, "strategy": "trainer", "iteration": trainer.state.global_step}
    return Save(storage, choose.group_of(trainer.args), facts, _make_way, kind="save_checkpoint")


def _written(write: Callable[[], Any], plan: SavePlan, goes_on: bool) -> dict[str, capture.Stamp]:
    """Let the Trainer write, and return the stamps of the plan's files. For a full disk raise the system's error, not the libraries'."""
    try:
        with capture.into(plan, waits=goes_on) as stamps:
            write()
        return stamps
    except Exception as error:
        if isinstance(error, OSError) and error.errno or shutil.disk_usage(plan.folder).free > _LEAST:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), plan.folder) from error


def _make_way(storage: CheckpointStorage) -> None:
    """Check that the new checkpoint can replace whatever is at the location. For the leader, before it stages."""
    place = storage.location
    if not os.path.isdir(place):
        return
    if reason := choose.flaw(place):
        logger.warning("%s is replaced; it was not whole: %s", place, reason)
        storage.remove()
    elif not os.path.exists(os.path.join(place, NAME)):
        # A complete one of the stock Trainer. Its files must be known when the new one replaces it.
        Manifest(unlisted(place, (), 0)).write(place)


def _settle_state(trainer: Any, run_dir: str, place: str, staged: str) -> None:
    """Let the best checkpoint be where it will be, in the Trainer's state and in the file of it; and add what `ranks` reads."""
    state, best = trainer.state, getattr(trainer.state, "best_global_step", None)
    if state.best_model_checkpoint == staged:
        state.best_model_checkpoint = place
    elif best and os.path.isdir(choose.place_of(run_dir, best)):
        state.best_model_checkpoint = choose.place_of(run_dir, best)
    path = os.path.join(staged, choose.STATE)
    if trainer.args.should_save and os.path.isfile(path):
        state.save_to_json(path)
        ranks.record(trainer, staged)


# -- older ones --------------------------------------------------------------------------------------------------------


def _rotate(trainer: Any, run_dir: str, new: CheckpointStorage, limited: bool = True) -> None:
    """Remove the oldest complete checkpoints beyond `save_total_limit`; not the new one, nor the best. One rank per file system.

    Without `limited` only remains of killed saves are removed. The new one is published by then, so errors only warn. Incomplete
    ones stay, to be inspected.
    """
    folder, limit, best = LocalStorage(run_dir), trainer.args.save_total_limit, trainer.state.best_model_checkpoint

    def by_age() -> list[CheckpointStorage]:
        """Return complete ones by time of creation, if the file system has it: a run may start again below the numbers of others."""
        places = [choose.place_of(folder.location, number) for number in reversed(choose.numbers(folder.location))]
        places = [place for place in places if not os.path.islink(place)]  # the target of a link is not the run's
        times = {place: os.stat(place).st_mtime for place in places if not choose.flaw(place)}
        tells = max(times.values(), default=0) - min(times.values(), default=0) >= 1.0
        return [LocalStorage(place) for place in (sorted(times, key=times.__getitem__) if tells else times)]

    prune(
        folder,
        limit if limited and limit and limit > 0 else None,
        [new.location, os.path.realpath(best or "")],
        by_age,
    )
