"""The position of a loader, in a form that can be saved and restored.

It holds the epoch, the batches and samples consumed, and what drew the order of the epoch that is running; so a restored
loader draws the same order again, whatever else has used the random generators in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from accelerate.base._warn import warn_user
from accelerate.data import adapter, samplers
from accelerate.data.adapter import DataLoaderAdapter, shuffling_generator
from accelerate.data.progress import Position
from accelerate.data.samplers import ReplayableRandomSampler, SeedableRandomSampler
from accelerate.runtime import generators, storage

logger = logging.getLogger(__name__)

KEY = "accelerate_position"


def capture(loader: DataLoaderAdapter) -> dict[str, Any]:
    """Return the position of a loader, as of the batch yielded last; after the last batch, the next epoch's start.

    The keys of the record:

    - `epoch`: the epoch that a resumed run continues or begins.
    - `batches`: batches of this process behind the position; 0 at the start of an epoch.
    - `samples`: samples of all processes behind it; None if batches have no fixed size.
    - `order`: what the order of the epoch is drawn from, by `kind`.
    - `shards`: batches of a step over all processes.
    - `running`: the loop over the loader was open.
    - `parts`: micro-batches that each batch is yielded in.
    - `part`: micro-batches of the next batch that were yielded.
    - `data`: length of the dataset and kind of the sampler, which `check` compares.
    - `worker_seed`: seed of the datasets in workers.
    - `workers_kept`: persistent workers had been started.
    - `finished`: batches of an epoch that has just ended; else 0.

    Within an epoch also:

    - `anew`: state of the generator of the order when saved; an epoch that begins again starts from it.
    - `at_start`: states of all generators at the start of the epoch.
    - `before_read`: states of the generators before each step that was read ahead.
    - `dataset_state`: state of a stream before the first of these steps.
    """
    progress, start = loader._progress, loader._progress.start
    if progress.pending_in_epoch:
        return dict(progress.pending.record)
    epoch, yielded = progress.epoch, progress.batches
    # A rank that ends before others stays in their epoch, so that all ranks continue in the same one.
    at_end = progress.at_end and not loader._ends_before_others()
    in_epoch = (yielded > 0 or progress.micro_batch > 0) and not at_end
    batches = yielded if in_epoch else 0
    size = loader._samples_per_step()
    record = {
        "epoch": epoch if in_epoch or yielded == 0 else epoch + 1,
        "batches": batches,
        "samples": None if size is None else size * batches + (start.extra_samples if in_epoch else 0),
        "order": _order(loader, in_epoch),
        "shards": loader._batches_per_step(),
        "running": in_epoch and progress.running,
        "parts": progress.micro_batches,
        "part": progress.micro_batch,
        "data": loader._data(),
        "worker_seed": progress.worker_seed,
        "workers_kept": progress.workers_kept,
        "finished": yielded if at_end else 0,
    }
    if in_epoch:
        generator, before_read = shuffling_generator(loader, loader.get_sampler()), progress.before_read or {}
        record["anew"] = None if generator is None else generator.get_state()
        record["at_start"] = start.generators
        # The reads that went ahead of the batch yielded last: a run that continues makes them again.
        ahead = [before_read[step] for step in sorted(before_read) if step > batches]
        record["before_read"] = [states.generators for states in ahead if states.generators is not None]
        record["dataset_state"] = ahead[0].dataset if ahead else None
    return record


def _order(loader: DataLoaderAdapter, in_epoch: bool) -> dict[str, Any]:
    sampler = loader.get_sampler()
    generator = shuffling_generator(loader, sampler)
    if isinstance(sampler, SeedableRandomSampler):
        return {"kind": "seed_and_epoch", "seed": sampler.initial_seed}
    if generator is not None:
        return {
            "kind": "generator",
            "state": loader._progress.start.order_generator if in_epoch else generator.get_state(),
        }
    if isinstance(sampler, ReplayableRandomSampler) and in_epoch:
        return {"kind": "seed", "seed": sampler.seed}
    return {"kind": "unrecorded"}


def kept(loader: DataLoaderAdapter) -> Callable[[], None]:
    """Return a function that resets a loader, its sampler and its generator to their present position."""
    sampler = loader.get_sampler()
    generator = shuffling_generator(loader, sampler)
    state = None if generator is None else generator.get_state()
    parts = (loader, loader._progress, loader.base_dataloader, sampler)
    attributes = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]

    def put_back() -> None:
        for present, former in attributes:
            present.clear()
            present.update(former)
        if generator is not None:
            generator.set_state(state)

    return put_back


def check(loader: DataLoaderAdapter, record: dict[str, Any], name: str = "The loader") -> None:
    """Raise ValueError, before anything has changed, for a position within an epoch of other data.

    Not a collective.
    """
    saved = record.get("data")
    if saved is None or record["batches"] == 0:
        return
    data = loader._data()
    for part, label in (("length", "a dataset of {} samples"), ("sampler", "the sampler {}")):
        if saved[part] != data[part] and None not in (saved[part], data[part]):
            raise ValueError(
                f"{name} reads {label.format(data[part])}, but its checkpoint was saved within an epoch of "
                f"{label.format(saved[part])}. Prepare the data as it was, or set continue_after_load=False."
            )


def restore(loader: DataLoaderAdapter, record: dict[str, Any], continuing: bool = True) -> int:
    """Put a loader into the epoch of a position, whose order it draws again; return the batches behind.

    The next iteration continues there if the loader was being iterated and `continuing` is true, or if it skips as many batches
    (`skip_first_batches`). Any other begins the epoch again. The number of processes may differ.

    Not a collective.
    """
    if continuing:
        check(loader, record)
    progress = loader._progress
    drop_loaded_state(loader)
    progress.epoch = record["epoch"]
    progress.batches, progress.at_end = 0, False
    progress.worker_seed = record.get("worker_seed")
    progress.workers_kept = record.get("workers_kept", False)
    progress.finished = record.get("finished", 0)
    in_epoch = record["batches"] > 0 or record.get("part", 0) > 0
    restore_order(loader, record["order"], in_epoch=in_epoch)
    batches, extra = _behind(loader, record)
    if in_epoch and (batches, extra) != (record["batches"], 0):
        _warn_if_nothing_is_left(loader, batches, extra)
    resume_without_skip = continuing and record.get("running", True)
    progress.pending = Position(record, batches, extra, resume_without_skip) if in_epoch else None
    return batches


def drop_loaded_state(loader: DataLoaderAdapter) -> None:
    """Let torchdata's loader begin its next epoch at the first batch, whatever state it was given."""
    origin = loader if loader._origin is None else loader._origin
    if getattr(origin.base_dataloader, "next_iter_state", None) is not None:
        origin.base_dataloader.next_iter_state = None


def restore_order(loader: DataLoaderAdapter, order: dict[str, Any], in_epoch: bool) -> None:
    """Let a loader draw the recorded order; warn, for an epoch that was interrupted, where its sampler cannot. Not a collective."""
    sampler, kind = loader.get_sampler(), order["kind"]
    generator = shuffling_generator(loader, sampler)
    replayable = isinstance(sampler, ReplayableRandomSampler)
    if kind == "seed_and_epoch" and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = order["seed"]
    elif kind == "seed" and generator is not None:
        generator.manual_seed(order["seed"])
    elif kind == "seed" and replayable:
        sampler.replay = order["seed"]
    elif kind == "generator" and (generator is not None or replayable):
        if generator is None:
            generator = sampler.generator = torch.Generator()
        generator.set_state(generators.generator_state(order["state"]))
    elif in_epoch and (kind != "unrecorded" or getattr(sampler, "generator_is_ours", False)):
        warn_user(
            f"The saved order of the data ({kind}) does not fit the loader's sampler ({type(sampler).__name__}): the "
            "interrupted epoch will be continued in another order. Prepare the loader as it was when it was saved."
        )


def _behind(loader: DataLoaderAdapter, record: dict[str, Any]) -> tuple[int, int]:
    """Steps behind a position, and samples of all processes beyond them, as this loader counts."""
    behind, size, unit = record["samples"], loader._samples_per_step(), "samples"
    if size is None or behind is None:  # nothing says how many samples a batch has
        size, unit = loader._batches_per_step(), "batches"
        behind = record["batches"] * record.get("shards", size)
    steps, rest = divmod(behind, size)
    if unit == "samples" and (steps, rest) != (record["batches"], 0):
        resume_point = f"{steps} steps" + (f" and {rest} samples" if rest else "")
        report(
            f"The interrupted epoch has {behind} samples behind it; with {size} a step it continues after {resume_point}."
        )
    base, before, parts = loader.base_dataloader, record.get("shards"), loader._parts()
    if parts > 1 and loader._reading.ends_by_vote and before not in (None, loader._batches_per_step()):
        warn_user(
            f"The interrupted epoch had steps of {before} batches, and its sampler divides the data among {parts} processes now: "
            "some samples will be seen again and others omitted, unless it deals them out in turn."
        )
    if rest and parts == 1 and unit == "samples" and adapter.skips_by_index(base):
        if samplers.skips_samples(adapter.batching_sampler(base)):
            return steps, rest
    if rest:
        warn_user(
            f"The interrupted epoch had consumed {behind} {unit}, which is not a multiple of the {size} that a step takes "
            f"now: its last {rest} {unit} will be seen again, because this kind of loader continues at whole steps only."
        )
    return steps, 0


def _warn_if_nothing_is_left(loader: DataLoaderAdapter, batches: int, extra: int) -> None:
    size, samples = loader._samples_per_step(), adapter.samples_per_epoch(loader.base_dataloader)
    if not loader._drop_last or size is None or samples is None:
        return
    left = samples * loader._parts() - batches * size - extra
    if left < size:
        warn_user(
            f"The interrupted epoch ends without a batch: {left} samples are left, a step takes {size} now, and "
            "drop_last=True drops an incomplete step. An open accumulation step ends in the next epoch."
        )


def report(message: str) -> None:
    """Log where a loader continues."""
    # Visible by default, on one process of a machine: a program that skips batches itself would skip them twice.
    first = storage.process.current.get("local_process_index", 0) == 0
    logger.log(logging.WARNING if first else logging.INFO, message)


# States of torchdata's loader ------------------------------------------------------------------------------------------


def holds_dataset_state(state: Any) -> bool:
    """Whether a state of a `StatefulDataLoader` contains one of its dataset or of the dataset's iterator."""
    if not isinstance(state, dict):
        return False
    parts = (state.get("dataset_state"), state.get("dataset_iter_state"))
    return any(part is not None for part in parts) or any(holds_dataset_state(part) for part in state.values())


def restores_stream(state: dict[str, Any]) -> bool:
    """Whether torchdata's loader finds the position in a stream again from a state, now and when it is saved once more.

    It reads a stream without a state again from the beginning, and then counts those batches twice. A worker that has
    reached the end is asked again, and its stream may have returned to the beginning.
    """
    if batches_read(state) is None:
        return True  # of a loader that is not torchdata's
    workers = _workers(state).values()
    ended = any((worker.get("fetcher_state") or {}).get("fetcher_ended") for worker in workers)
    return holds_dataset_state(state) and not ended


def batches_read(state: dict[str, Any]) -> int | None:
    """Return the batches of the epoch behind a state of torchdata's loader, 0 at its end; None for another loader's state."""
    if state.get("_iterator_finished"):
        return 0
    if "_snapshot" in state:
        return state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
    return state.get("_num_yielded")


def with_unread_workers(state: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any] | None:
    """Return a state in which workers that have read nothing since `loaded` was loaded keep their state of `loaded`.

    Their own is that of a stream whose generator has not started yet, which is often the beginning. None: all have read.
    """
    workers, before = _workers(state), _workers(loaded)
    now, then = state.get("_snapshot", {}), loaded.get("_snapshot", {})
    if not workers or now["_snapshot_step"] - then["_snapshot_step"] >= len(workers):
        return None
    first, read = then["_last_yielded_worker_id"] + 1, now["_last_yielded_worker_id"] - then["_last_yielded_worker_id"]
    have_read = {f"worker_{(first + number) % len(workers)}" for number in range(read % len(workers))}
    kept = {name: worker if name in have_read else before.get(name, worker) for name, worker in workers.items()}
    return {**state, "_snapshot": {**now, "_worker_snapshots": kept}}


def _workers(state: dict[str, Any]) -> dict[str, Any]:
    return state.get("_snapshot", {}).get("_worker_snapshots", {})
