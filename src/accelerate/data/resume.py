"""Where a loader stands within its data, in a form that can be saved and found again.

A position tells the epoch, the batches and samples consumed, and what drew the order of the epoch that is running; so a
restored loader draws the same order again, whatever else has used the random generators in between.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from accelerate.data import lengths
from accelerate.data.samplers import ReplayableRandomSampler, SeedableRandomSampler

if TYPE_CHECKING:
    from accelerate.data.loader import PreparedLoader

KEY = "accelerate_position"
VERSION = 1


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
    """Keep the state of the shuffling generator, as an epoch begins and before the order is drawn."""
    generator = shuffling_generator(loader)
    loader._progress.generator_state = None if generator is None else generator.get_state()


def capture(loader: PreparedLoader) -> dict[str, Any]:
    """Take the position of a loader, as of the batch yielded last.

    Call it on every process, during or after an iteration; no communication.

    Args:
        loader: a prepared loader.

    Returns:
        `version`, `epoch`, `batches` (of this process, in this epoch), `samples` (of all processes, None if batches
        have no fixed size) and `order` (what the order is drawn from, see `restore`). After the last batch it is the
        beginning of the next epoch.
    """
    progress = loader._progress
    in_epoch = progress.batches > 0 and not progress.at_end
    batches = progress.batches if in_epoch else 0
    size = loader._samples_per_step()
    return {
        "version": VERSION,
        "epoch": progress.epoch if in_epoch or progress.batches == 0 else progress.epoch + 1,
        "batches": batches,
        "samples": None if size is None else size * batches,
        "order": _order(loader, in_epoch),
    }


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


def restore(loader: PreparedLoader, position: dict[str, Any]) -> int:
    """Put a loader into the epoch of a position and make it draw that epoch's order again.

    The batches already consumed are not left out by this; pass the result to `skip_first_batches`, or use the loader's
    `load_state_dict`. Call it on every process.

    Args:
        loader: a loader that was prepared like the one the position was taken from; the number of processes may differ.
        position: from `capture`.

    Returns:
        Number of batches, per process, that the epoch has behind it.

    Raises:
        ValueError: the position was written by a later version.
    """
    if position["version"] > VERSION:
        raise ValueError(
            f"position has version {position['version']}, this library reads up to {VERSION}. Update the library."
        )
    loader.iteration = position["epoch"]
    loader._progress.batches = 0
    loader._progress.replaying = position["batches"] > 0
    _restore_order(loader, position["order"], in_epoch=position["batches"] > 0)
    return _batches_behind(loader, position)


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
        generator.set_state(order["state"])
    elif kind == "generator" and isinstance(sampler, ReplayableRandomSampler):
        sampler.generator = torch.Generator()
        sampler.generator.set_state(order["state"])
    elif in_epoch and kind != "unrecorded":
        warnings.warn(
            f"The saved order of the data ({kind}) does not fit the loader's sampler ({type(sampler).__name__}): the "
            "interrupted epoch will be continued in another order. Prepare the loader as it was when it was saved.",
            stacklevel=3,
        )


def _batches_behind(loader: PreparedLoader, position: dict[str, Any]) -> int:
    size, samples = loader._samples_per_step(), position["samples"]
    if size is None or samples is None:
        return position["batches"]
    batches, rest = divmod(samples, size)
    if rest:
        warnings.warn(
            f"The interrupted epoch had consumed {samples} samples, which is not a multiple of the present total batch "
            f"size of {size}: its last {rest} samples will be seen again.",
            stacklevel=3,
        )
    return batches
