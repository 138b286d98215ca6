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
    """Give the three generators of this process their states back."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"].cpu())


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
