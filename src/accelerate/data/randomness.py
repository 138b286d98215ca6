"""The generators that code for reading data draws from: Python's, numpy's and torch's on the processor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    """Return the states of the three generators of this process."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_states(saved: dict[str, Any]) -> None:
    """Give the three generators of this process their states back.

    Args:
        saved: From ``states``, or that in the form of ``plain``.
    """
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    legacy = saved["numpy"]  # a dict, if the program has given numpy another bit generator
    np.random.set_state(
        legacy if isinstance(legacy, dict) else (legacy[0], np.asarray(legacy[1], np.uint32), *legacy[2:])
    )
    torch.set_rng_state(generator_state(saved["torch"]))


def generator_state(saved: Any) -> torch.Tensor:
    """Return what ``set_state`` of a torch generator takes: a state, or that in the form of ``plain``."""
    return torch.as_tensor(saved, dtype=torch.uint8).cpu()


def plain(saved: Any) -> Any:
    """Return states of generators, nested in dicts and lists, as numbers, strings, lists and dicts: what JSON can hold."""
    if isinstance(saved, dict):
        return {name: plain(value) for name, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return [plain(value) for value in saved]
    return saved.tolist() if isinstance(saved, (np.ndarray, np.generic, torch.Tensor)) else saved


def seed_all(seed: int) -> None:
    """Seed the three generators of this process.

    Args:
        seed: any non-negative number below 2**64.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which would reach for the generators of every device too.
    torch.default_generator.manual_seed(seed % 2**63)


@contextmanager
def kept() -> Iterator[None]:
    """Give the generators their states back at the end of a `with` block, whatever it has drawn."""
    before = states()
    try:
        yield
    finally:
        set_states(before)
