"""Where a loader stands within its data, in a form that can be saved and found again.

A position tells the epoch, the batches and samples consumed, and what drew the order of the epoch that is running; so a
restored loader draws the same order again, whatever else has used the random generators in between.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import SequentialSampler

from accelerate.data import lengths, randomness
from accelerate.data.adapter import is_stateful
from accelerate.data.samplers import ReplayableRandomSampler, SeedableRandomSampler
from accelerate.data.state import Pending
from accelerate.runtime import storage

if TYPE_CHECKING:
    from accelerate.data.loader import PreparedLoader

logger = logging.getLogger(__name__)

KEY = "accelerate_position"
VERSION = 1


def _tell(message: str, *values: Any) -> None:
    # Visible by default, on one process of a machine: a program that leaves out batches by itself would do so twice.
    first = storage.process.current.get("local_process_index", 0) == 0
    logger.log(logging.WARNING if first else logging.INFO, message, *values)


def shuffling_generator(loader: PreparedLoader) -> torch.Generator | None:
    """The generator that decides the order of the samples, or None if something else does."""
    sampler = lengths.get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return None
    for owner, name in ((sampler, "generator"), (loader, "synchronized_generator"), (loader.dataset, "generator")):
        generator = getattr(owner, name, None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def note_start(loader: PreparedLoader) -> None:
    """Keep the states of the generators, as an epoch begins and before its order is drawn."""
    generator = shuffling_generator(loader)
    loader._progress.generator_state = None if generator is None else generator.get_state()
    if not loader._progress.replaying:  # then they are those that were loaded
        loader._progress.at_start = randomness.states()


def capture(loader: PreparedLoader) -> dict[str, Any]:
    """Take the position of a loader, as of the batch yielded last.

    Call it on every process, during or after an iteration; no communication.

    Args:
        loader: a prepared loader.

    Returns:
        `version`, `epoch`, `batches` (of this process, in this epoch), `samples` (of all processes, None if batches
        have no fixed size), `shards` (batches that a step takes over all processes), `order` (what the order is drawn
        from, see `restore`), `running` (whether the loader is being iterated), `data` (what the loader reads, to tell a
        checkpoint of other data), `worker_seed`, `workers_kept`, `finished` (batches of the epoch that is over with the
        batch yielded last), and where they are needed the generator's state `anew`, the random states `at_start` and
        `before_read` and the stream's `dataset_state`. After the last batch it is the beginning of the next epoch.
    """
    progress = loader._progress
    if progress.pending is not None and progress.pending.position is not None:
        return dict(progress.pending.position)
    epoch, yielded, at_end = progress.handed_out or (progress.epoch, progress.batches, progress.at_end)
    in_epoch = yielded > 0 and not at_end
    batches = yielded if in_epoch else 0
    size = loader._samples_per_step()
    position = {
        "version": VERSION,
        "epoch": epoch if in_epoch or yielded == 0 else epoch + 1,
        "batches": batches,
        "samples": None if size is None else size * batches + (progress.extra_samples if in_epoch else 0),
        "order": _order(loader, in_epoch),
        "shards": lengths.batches_per_step(loader.base_dataloader) * loader._reads_per_step(),
        "running": in_epoch and (progress.running or progress.handed_out is not None),
        "data": _data(loader),
        "worker_seed": progress.worker_seed,
        "workers_kept": progress.workers_kept,
        "finished": yielded if at_end else 0,
    }
    if in_epoch:
        generator = shuffling_generator(loader)
        position["anew"] = None if generator is None else generator.get_state()
        position["at_start"] = progress.at_start if _drawn_at_start(loader, position["order"]) else None
        noted = progress.before_read
        # The reads that went ahead of the batch yielded last: a run that goes on makes them again.
        position["before_read"] = noted and [noted[step] for step in sorted(noted) if step > batches]
        position["dataset_state"] = progress.dataset_state
    return position


def kept(loader: PreparedLoader) -> Callable[[], None]:
    """Return what puts a loader back to where it stands now, with the parts of it that decide what it yields."""
    generator = shuffling_generator(loader)
    state = None if generator is None else generator.get_state()
    parts = (loader, loader._progress, loader.base_dataloader, lengths.get_sampler(loader))
    attributes = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]

    def put_back() -> None:
        for present, former in attributes:
            present.clear()
            present.update(former)
        if generator is not None:
            generator.set_state(state)

    return put_back


def plain(position: dict[str, Any]) -> dict[str, Any]:
    """Return a position as numbers, strings, lists and dicts alone, but for what a dataset says of itself.

    Args:
        position: from `capture`.
    """
    return {name: value if name == "dataset_state" else randomness.plain(value) for name, value in position.items()}


def _drawn_at_start(loader: PreparedLoader, order: dict[str, Any]) -> bool:
    """Whether the epoch depends on the random states at its start: the order of an unknown sampler, streams, and samples
    of the first step that complete the last one."""
    if loader._needs_head():
        return True
    in_order = isinstance(lengths.get_sampler(loader), SequentialSampler)
    return lengths.is_stream(loader) or (order["kind"] == "unrecorded" and not in_order)


def _data(loader: PreparedLoader) -> dict[str, Any]:
    """What a loader reads: number of samples of the dataset and kind of the sampler, None where there is none."""
    stream = lengths.is_stream(loader)
    sampler = None if stream else lengths.get_sampler(loader)
    if sampler is None and not stream:
        sampler = lengths.innermost(lengths.batching_sampler(loader))
    # Samplers that were made replayable in place draw as the plain one does.
    kind = "RandomSampler" if isinstance(sampler, ReplayableRandomSampler) else type(sampler).__name__
    try:
        length = lengths.dataset_length(loader.dataset)
    except TypeError:
        length = None
    return {"length": length, "sampler": None if sampler is None else kind}


def check(loader: PreparedLoader, position: dict[str, Any], name: str = "The loader") -> None:
    """Refuse a position that belongs to other data, before anything has changed. Any rank, alone.

    Args:
        loader: the loader that would continue there.
        position: from `capture`.
        name: which loader it is, for messages.

    Raises:
        ValueError: the position was written by a later version, or with a dataset of another length, or another kind of
            sampler.
    """
    if position["version"] > VERSION:
        raise ValueError(
            f"position has version {position['version']}, this library reads up to {VERSION}. Update the library."
        )
    saved, own = position.get("data"), _data(loader)
    if saved is None or position["batches"] == 0:
        return
    for part, label in (("length", "a dataset of {} samples"), ("sampler", "the sampler {}")):
        if saved[part] != own[part] and None not in (saved[part], own[part]):
            raise ValueError(
                f"{name} reads {label.format(own[part])}, but its checkpoint was saved within an epoch of "
                f"{label.format(saved[part])}: the interrupted epoch cannot go on. Prepare the data as it was, or begin "
                "epochs anew with DataLoaderConfiguration(continue_after_load=False)."
            )


def _order(loader: PreparedLoader, in_epoch: bool) -> dict[str, Any]:
    sampler = lengths.get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return {"kind": "seed_and_epoch", "seed": sampler.initial_seed}
    generator = shuffling_generator(loader)
    if generator is not None:
        return {
            "kind": "generator",
            "state": loader._progress.generator_state if in_epoch else generator.get_state(),
        }
    if isinstance(sampler, ReplayableRandomSampler) and in_epoch:
        return {"kind": "seed", "seed": sampler.seed}
    return {"kind": "unrecorded"}


def restore(loader: PreparedLoader, position: dict[str, Any], continuing: bool = True) -> int:
    """Put a loader into the epoch of a position and make it draw that epoch's order again.

    The next iteration goes on after the batches behind the position if the loader was being iterated, or if it leaves out
    as many (`skip_first_batches`); any other begins the epoch anew. Call it on every process.

    Args:
        loader: a loader that was prepared like the one the position was taken from; the number of processes may differ.
        position: from `capture` or `plain`.
        continuing: whether a loader that was being iterated goes on by itself.

    Returns:
        Number of batches, per process, that the epoch has behind it.

    Raises:
        ValueError: the position belongs to other data, or was written by a later version.
    """
    check(loader, position) if continuing else None
    progress = loader._progress
    progress.epoch = position["epoch"]
    progress.batches = progress.extra_samples = 0
    progress.at_end = False
    progress.worker_seed = position.get("worker_seed")
    progress.workers_kept = position.get("workers_kept", False)
    progress.finished = position.get("finished", 0)
    progress.at_start = position.get("at_start")
    in_epoch = position["batches"] > 0
    _restore_order(loader, position["order"], in_epoch=in_epoch)
    batches, extra = _behind(loader, position)
    progress.pending = None
    if in_epoch:
        progress.pending = Pending(
            batches,
            extra,
            alone=continuing and position.get("running", True),
            before_read=position.get("before_read"),
            dataset_state=position.get("dataset_state"),
            anew=position.get("anew"),
            position=position,
        )
    return batches


def instead_of(view: PreparedLoader) -> Iterable[Any] | None:
    """Tell what a view of `skip_first_batches` iterates over in place of its own batches, after a load. Any rank, alone.

    Returns:
        Nothing at all, if it leaves out all batches of the epoch that was over when the checkpoint was saved: the loader
        stands at the next epoch already. Its origin, if that is stateful and continues there by itself. Else None.
    """
    progress = view._progress
    finished, progress.finished = progress.finished, 0
    if not view._is_view:
        return None
    left_out, pending = view._left_out(), progress.pending
    if finished and pending is None and left_out == finished:
        return ()
    if pending is not None and pending.batches == left_out and is_stateful(view.base_dataloader):
        progress.pending = replace(pending, alone=True)
        return view._origin
    return None


def settle(loader: PreparedLoader) -> Pending | None:
    """Decide, as an iteration begins, whether it continues at a position that was loaded. Any rank, alone.

    Returns:
        The position to continue at; None for an epoch from its beginning, or from where the loader's own skip says.
    """
    progress = loader._progress
    pending, progress.pending = progress.pending, None
    if pending is None:
        return None
    left_out = loader._left_out()
    if left_out == pending.batches or (pending.alone and not loader._is_view):
        progress.replaying = True
        if not loader._is_view:
            _tell(
                "The loader goes on in epoch %d after %d of its batches, where the checkpoint was saved. "
                "DataLoaderConfiguration(continue_after_load=False) begins epochs anew.",
                progress.epoch,
                pending.batches,
            )
        return pending
    if left_out:
        progress.replaying = True
        return None
    generator, sampler = shuffling_generator(loader), lengths.get_sampler(loader)
    if generator is not None and pending.anew is not None:
        generator.set_state(randomness.generator_state(pending.anew))
    if isinstance(sampler, ReplayableRandomSampler):
        sampler.replay = None
    return None


def _restore_order(loader: PreparedLoader, order: dict[str, Any], in_epoch: bool) -> None:
    sampler, kind = lengths.get_sampler(loader), order["kind"]
    if kind == "seed_and_epoch" and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = order["seed"]
        return
    generator = shuffling_generator(loader)
    if kind == "seed" and generator is not None:
        generator.manual_seed(order["seed"])
    elif kind == "seed" and isinstance(sampler, ReplayableRandomSampler):
        sampler.replay = order["seed"]
    elif kind == "generator" and generator is not None:
        generator.set_state(randomness.generator_state(order["state"]))
    elif kind == "generator" and isinstance(sampler, ReplayableRandomSampler):
        sampler.generator = torch.Generator()
        sampler.generator.set_state(randomness.generator_state(order["state"]))
    elif in_epoch and kind != "unrecorded":
        warnings.warn(
            f"The saved order of the data ({kind}) does not fit the loader's sampler ({type(sampler).__name__}): the "
            "interrupted epoch will be continued in another order. Prepare the loader as it was when it was saved.",
            stacklevel=3,
        )


def _behind(loader: PreparedLoader, position: dict[str, Any]) -> tuple[int, int]:
    """Steps behind a position, and samples of all processes beyond them, as this loader counts."""
    size, samples = loader._samples_per_step(), position["samples"]
    if size is None or samples is None:
        return _steps_behind(loader, position), 0
    batches, rest = divmod(samples, size)
    if (batches, rest) != (position["batches"], 0):
        _tell(
            "The interrupted epoch has %d samples behind it; with %d samples a step it goes on after %d steps%s.",
            samples,
            size,
            batches,
            f" and {rest} samples" if rest else "",
        )
    if rest and not lengths.skips_samples(loader):
        warnings.warn(
            f"The interrupted epoch had consumed {samples} samples, which is not a multiple of the present total batch "
            f"size of {size}: its last {rest} samples will be seen again, because this kind of loader continues at whole "
            "batches only.",
            stacklevel=3,
        )
        return batches, 0
    return batches, rest


def _steps_behind(loader: PreparedLoader, position: dict[str, Any]) -> int:
    """Steps behind a position, when nothing says how many samples a batch has: batches are counted instead."""
    now = lengths.batches_per_step(loader.base_dataloader) * loader._reads_per_step()
    behind = position["batches"] * position.get("shards", now)
    steps, rest = divmod(behind, now)
    if rest:
        warnings.warn(
            f"The interrupted epoch had consumed {behind} batches, which is not a multiple of the {now} that a step takes "
            f"now: its last {rest} batches will be seen again.",
            stacklevel=4,
        )
    return steps
