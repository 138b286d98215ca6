"""Where a run stands, in a form that can be saved and found again: positions of loaders, and states of random generators.

The position of a loader holds the epoch, the batches and samples consumed, and what drew the order of the epoch that is
running; so a restored loader draws the same order again, whatever else has used the random generators in between.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from accelerate._warn import warn_user
from accelerate.data.samplers import ReplayableRandomSampler, SeedableRandomSampler, skips_samples
from accelerate.devices.table import DEVICES
from accelerate.runtime import storage

if TYPE_CHECKING:
    from accelerate.data.loader import PreparedLoader

logger = logging.getLogger(__name__)

KEY = "accelerate_position"


@dataclass(frozen=True)
class Pending:
    """A position within an epoch that was loaded and waits for the next iteration; an empty one has only its order drawn again."""

    position: dict[str, Any]
    batches: int
    extra_samples: int = 0
    resume_without_skip: bool = True


@dataclass(frozen=True)
class Noted:
    """State from before the reads of a step, for a run that goes on there; None where it is not needed."""

    random: dict[str, Any] | None = None
    dataset: Any = None
    loader: dict[str, Any] | None = None


@dataclass
class Progress:
    """Where a loader stands. The views that `skip_first_batches` makes share it with their origin."""

    epoch: int = 0
    batches: int = 0
    # Micro-batches that each batch is handed out in, and how many of the present one were; 0 when all were.
    parts: int = 1
    part: int = 0
    loops_in_parts: int = 0
    extra_samples: int = 0
    running: bool = False
    pending: Pending | None = None
    finished: int = 0
    at_end: bool = False
    generator_state: torch.Tensor | None = None
    at_start: dict[str, Any] | None = None
    noted: dict[int, Noted] | None = None
    workers_kept: bool = False
    worker_seed: int | None = None


# Generators that code for reading data draws from: Python's, numpy's and torch's on the processor ------------------------


def states() -> dict[str, Any]:
    """Return the states of the three generators of this process."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_states(saved: dict[str, Any]) -> None:
    """Give the three generators of this process their states back: from `states`, or that in the form of `plain`."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    legacy = saved["numpy"]  # a dict, if the program has given numpy another bit generator
    np.random.set_state(legacy if isinstance(legacy, dict) else tuple(legacy))
    torch.set_rng_state(generator_state(saved["torch"]))


def generator_state(saved: Any) -> torch.Tensor:
    """Return what `set_state` of a torch generator takes: a state, or that in the form of `plain`."""
    return torch.as_tensor(saved, dtype=torch.uint8).cpu()


def plain_states(saved: Any) -> Any:
    """Return states of generators, nested in dicts and lists, as numbers, strings, lists and dicts: what JSON can hold."""
    if isinstance(saved, dict):
        return {name: plain_states(value) for name, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return [plain_states(value) for value in saved]
    return saved.tolist() if isinstance(saved, (np.ndarray, np.generic, torch.Tensor)) else saved


def mixed(*parts: Any) -> int:
    """Mix numbers, strings or lists of them into a seed of 63 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the three generators of this process with any non-negative number below 2**64."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which would reach for the generators of every device too.
    torch.default_generator.manual_seed(seed % 2**63)


@contextmanager
def generators_kept(within: dict[str, Any] | None = None) -> Iterator[None]:
    """Give the generators other states in a `with` block, if any are given, and their own back at its end, whatever was drawn."""
    before = states()
    if within is not None:
        set_states(within)
    try:
        yield
    finally:
        set_states(before)


# Positions -------------------------------------------------------------------------------------------------------------


def shuffling_generator(loader: PreparedLoader) -> torch.Generator | None:
    """The generator that decides the order of the samples, or None if something else does."""
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        return None
    for owner, name in ((sampler, "generator"), (loader, "synchronized_generator"), (loader.dataset, "generator")):
        generator = getattr(owner, name, None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def note_start(loader: PreparedLoader, pending: Pending | None) -> None:
    """Keep the states of the generators, as an epoch begins and before its order is drawn."""
    generator = shuffling_generator(loader)
    loader._progress.generator_state = None if generator is None else generator.get_state()
    if pending is None:  # else they are those that were loaded
        loader._progress.at_start = states()


def capture(loader: PreparedLoader) -> dict[str, Any]:
    """Return the position of a loader, as of the batch yielded last; after the last batch, the next epoch's start.

    `batches` counts those of this process, `samples` those of all (None if batches have no fixed size), `shards` the
    batches of a step over all processes, and `finished` the batches of an epoch that has just ended.
    """
    progress = loader._progress
    if progress.pending is not None:
        return dict(progress.pending.position)
    epoch, yielded, at_end = progress.epoch, progress.batches, progress.at_end
    in_epoch = (yielded > 0 or progress.part > 0) and not at_end
    batches = yielded if in_epoch else 0
    size = loader._samples_per_step()
    position = {
        "epoch": epoch if in_epoch or yielded == 0 else epoch + 1,
        "batches": batches,
        "samples": None if size is None else size * batches + (progress.extra_samples if in_epoch else 0),
        "order": _order(loader, in_epoch),
        "shards": loader._batches_per_step(),
        "running": in_epoch and progress.running,
        "parts": progress.parts,
        "part": progress.part,
        "data": loader._data(),
        "worker_seed": progress.worker_seed,
        "workers_kept": progress.workers_kept,
        "finished": yielded if at_end else 0,
    }
    if in_epoch:
        generator, noted = shuffling_generator(loader), progress.noted or {}
        position["anew"] = None if generator is None else generator.get_state()
        position["at_start"] = progress.at_start
        # The reads that went ahead of the batch yielded last: a run that goes on makes them again.
        ahead = [noted[step] for step in sorted(noted) if step > batches]
        position["before_read"] = [note.random for note in ahead if note.random is not None]
        position["dataset_state"] = ahead[0].dataset if ahead else None
    return position


def _order(loader: PreparedLoader, in_epoch: bool) -> dict[str, Any]:
    sampler, generator = loader.get_sampler(), shuffling_generator(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return {"kind": "seed_and_epoch", "seed": sampler.initial_seed}
    if generator is not None:
        return {"kind": "generator", "state": loader._progress.generator_state if in_epoch else generator.get_state()}
    if isinstance(sampler, ReplayableRandomSampler) and in_epoch:
        return {"kind": "seed", "seed": sampler.seed}
    return {"kind": "unrecorded"}


def kept(loader: PreparedLoader) -> Callable[[], None]:
    """Return what puts a loader back to where it stands now, with the parts of it that decide what it yields."""
    generator = shuffling_generator(loader)
    state = None if generator is None else generator.get_state()
    parts = (loader, loader._progress, loader.base_dataloader, loader.get_sampler())
    attributes = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]

    def put_back() -> None:
        for present, former in attributes:
            present.clear()
            present.update(former)
        if generator is not None:
            generator.set_state(state)

    return put_back


def check(loader: PreparedLoader, position: dict[str, Any], name: str = "The loader") -> None:
    """Refuse, before anything has changed, a position within an epoch of other data (ValueError). Any rank, alone."""
    saved = position.get("data")
    if saved is None or position["batches"] == 0:
        return
    own = loader._data()
    for part, label in (("length", "a dataset of {} samples"), ("sampler", "the sampler {}")):
        if saved[part] != own[part] and None not in (saved[part], own[part]):
            raise ValueError(
                f"{name} reads {label.format(own[part])}, but its checkpoint was saved within an epoch of "
                f"{label.format(saved[part])}. Prepare the data as it was, or set continue_after_load=False."
            )


def restore(loader: PreparedLoader, position: dict[str, Any], continuing: bool = True) -> int:
    """Put a loader into the epoch of a position, whose order it draws again; return the batches behind. All ranks.

    The next iteration goes on there if the loader was being iterated and `continuing` says so, or if it leaves out as
    many batches (`skip_first_batches`); any other begins the epoch anew. The number of processes may differ.
    """
    if continuing:
        check(loader, position)
    progress = loader._progress
    progress.epoch = position["epoch"]
    progress.batches = progress.extra_samples = 0
    progress.at_end = False
    progress.worker_seed = position.get("worker_seed")
    progress.workers_kept = position.get("workers_kept", False)
    progress.finished = position.get("finished", 0)
    progress.at_start = position.get("at_start")
    in_epoch = position["batches"] > 0 or position.get("part", 0) > 0
    _restore_order(loader, position["order"], in_epoch=in_epoch)
    batches, extra = _behind(loader, position)
    resume_without_skip = continuing and position.get("running", True)
    progress.pending = Pending(position, batches, extra, resume_without_skip) if in_epoch else None
    return batches


def _restore_order(loader: PreparedLoader, order: dict[str, Any], in_epoch: bool) -> None:
    sampler, kind, generator = loader.get_sampler(), order["kind"], shuffling_generator(loader)
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
        generator.set_state(generator_state(order["state"]))
    elif in_epoch and kind != "unrecorded":
        warn_user(
            f"The saved order of the data ({kind}) does not fit the loader's sampler ({type(sampler).__name__}): the "
            "interrupted epoch will be continued in another order. Prepare the loader as it was when it was saved."
        )


def _behind(loader: PreparedLoader, position: dict[str, Any]) -> tuple[int, int]:
    """Steps behind a position, and samples of all processes beyond them, as this loader counts."""
    behind, size, unit = position["samples"], loader._samples_per_step(), "samples"
    if size is None or behind is None:  # nothing says how many samples a batch has
        size, unit = loader._batches_per_step(), "batches"
        behind = position["batches"] * position.get("shards", size)
    steps, rest = divmod(behind, size)
    if unit == "samples" and (steps, rest) != (position["batches"], 0):
        place = f"{steps} steps" + (f" and {rest} samples" if rest else "")
        _report(f"The interrupted epoch has {behind} samples behind it; with {size} a step it goes on after {place}.")
    base, plan = loader.base_dataloader, loader.plan
    before, parts = position.get("shards"), loader._parts()
    if parts > 1 and plan.uneven and before not in (None, loader._batches_per_step()):
        warn_user(
            f"The interrupted epoch had steps of {before} batches, and its sampler divides the data among {parts} processes now: "
            "some samples will be seen again and others left out, unless it deals them out in turn."
        )
    if rest and parts == 1 and unit == "samples" and not isinstance(base.dataset, IterableDataset):
        if skips_samples(base.sampler if base.batch_sampler is None else base.batch_sampler):
            return steps, rest
    if rest:
        warn_user(
            f"The interrupted epoch had consumed {behind} {unit}, which is not a multiple of the {size} that a step takes "
            f"now: its last {rest} {unit} will be seen again, because this kind of loader continues at whole steps only."
        )
    return steps, 0


def _report(message: str) -> None:
    # Visible by default, on one process of a machine: a program that leaves out batches by itself would do so twice.
    first = storage.process.current.get("local_process_index", 0) == 0
    logger.log(logging.WARNING if first else logging.INFO, message)


def replacement_iterator(view: PreparedLoader) -> Iterable[Any] | None:
    """Return what a view of `skip_first_batches` iterates over in place of its own batches, after a load.

    That is nothing, if it leaves out all batches of an epoch that is over: the loader stands at the next one already;
    or its origin, if that is stateful and continues there by itself.
    """
    progress = view._progress
    finished, progress.finished = progress.finished, 0
    if view._origin is None:
        return None
    left_out, pending = view._left_out(), progress.pending
    if finished and pending is None and left_out == finished:
        return ()
    if pending is not None and pending.batches == left_out and is_stateful(view.base_dataloader):
        progress.pending = replace(pending, resume_without_skip=True)
        return view._origin
    return None


def take_pending_position(loader: PreparedLoader) -> Pending | None:
    """Return the loaded position that an iteration continues at, or None for an epoch that begins anew. Any rank, alone."""
    progress = loader._progress
    pending, progress.pending = progress.pending, None
    if pending is None:
        return None
    left_out = loader._left_out()
    if left_out == pending.batches or (pending.resume_without_skip and loader._origin is None):
        if loader._origin is None:
            _report(
                f"The loader goes on in epoch {progress.epoch} after {pending.batches} of its batches, where the checkpoint was "
                "saved. DataLoaderConfiguration(continue_after_load=False) begins epochs anew."
            )
        return pending
    if left_out:
        return Pending({}, left_out)
    generator, sampler = shuffling_generator(loader), loader.get_sampler()
    epoch_start_state = pending.position.get("anew")
    if generator is not None and epoch_start_state is not None:
        generator.set_state(generator_state(epoch_start_state))
    if isinstance(sampler, ReplayableRandomSampler):
        sampler.replay = None
    return None


def is_stateful(loader: Any) -> bool:
    """Whether a loader can save and restore its position by itself, like torchdata's `StatefulDataLoader`."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


# Generators in checkpoints: the same, and those of the devices ---------------------------------------------------------


def _sources(device: torch.device) -> dict[str, tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Return name, reader and setter of each generator by its key; asking another device's would start that up."""
    found = {
        "random_state": ("Python", random.getstate, random.setstate),
        "numpy_random_seed": ("numpy", np.random.get_state, np.random.set_state),
        "torch_manual_seed": ("torch (CPU)", torch.get_rng_state, torch.set_rng_state),
    }
    if device.type not in ("cpu", "mps"):
        row = DEVICES[device.type]
        key, name = ("xm_seed", "XLA") if device.type == "xla" else (f"torch_{device.type}_manual_seed", device.type)
        found[key] = (f"torch ({name})", row.get_rng_state_all, row.set_rng_state_all)
    return found


def collect_generators(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator of this process, by its key in a checkpoint. Any rank, alone."""
    return {key: get() for key, (_, get, _) in _sources(device).items()}


def restore_generators(states: dict[str, Any], device: torch.device, origin: str) -> None:
    """Set every generator that the states have; warn about one that cannot be set. Any rank, alone."""
    for key, (name, _, set_state) in _sources(device).items():
        try:
            set_state(states[key])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning(
                f"The random state of {name} in {origin} could not be restored: {reason}. It draws others now."
            )


def derive_generators(first: dict[str, Any], rank: int, device: torch.device, reason: str) -> None:
    """Seed the generators of a rank that the checkpoint does not have; equal runs give it the same seed."""
    seed = mixed(plain_states(first.get("torch_manual_seed")), rank)
    logger.warning(
        f"{reason}: the checkpoint was saved by fewer processes. Rank {rank} is new and seeds its random generators "
        f"with {seed}, derived from those of the first rank."
    )
    seed_all(seed)
    if device.type not in ("cpu", "mps", "xla"):
        DEVICES[device.type].manual_seed_all(seed)
