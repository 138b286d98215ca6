"""Random generators: the states of those that code for reading data draws from, and what a checkpoint holds of all of them."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from accelerate.devices.table import DEVICES

logger = logging.getLogger(__name__)

# Python's, numpy's and torch's on the processor ------------------------------------------------------------------------


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
def kept(within: dict[str, Any] | None = None) -> Iterator[None]:
    """Give the generators other states in a `with` block, if any are given, and their own back at its end, whatever was drawn."""
    before = states()
    if within is not None:
        set_states(within)
    try:
        yield
    finally:
        set_states(before)


# In checkpoints: the same, and those of the devices --------------------------------------------------------------------


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


def collect(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator of this process, by its key in a checkpoint. Not a collective."""
    return {key: get() for key, (_, get, _) in _sources(device).items()}


def restore(states: dict[str, Any], device: torch.device, origin: str) -> None:
    """Set every generator that the states have; warn about one that cannot be set. Not a collective."""
    for key, (name, _, set_state) in _sources(device).items():
        try:
            set_state(states[key])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning(
                f"The random state of {name} in {origin} could not be restored: {reason}. It draws others now."
            )


def derive(first: dict[str, Any], rank: int, device: torch.device, reason: str) -> None:
    """Seed the generators of a rank that the checkpoint does not have; equal runs give it the same seed."""
    seed = mixed(plain_states(first.get("torch_manual_seed")), rank)
    logger.warning(
        f"{reason}: the checkpoint was saved by fewer processes. Rank {rank} is new and seeds its random generators "
        f"with {seed}, derived from those of the first rank."
    )
    seed_all(seed)
    if device.type not in ("cpu", "mps", "xla"):
        DEVICES[device.type].manual_seed_all(seed)
