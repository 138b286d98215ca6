"""Random numbers: seeding a process, and giving all processes the same generator states."""

import os
import random
from collections.abc import Iterable
from operator import index

import numpy as np
import torch

from accelerate import comm
from accelerate.config.enums import RNGType
from accelerate.devices import detect
from accelerate.devices.table import DEVICES
from accelerate.runtime import storage

_LARGEST_SEED = 2**32 - 1


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy and torch, on every device.

    Not a collective.

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: add the process index, so that processes draw different numbers. Ranks that share each layer
            (tensor parallelism, once an Accelerator exists) draw the same, as their dropout must zero the same elements:
            there the number of the group is added.
        deterministic: also make torch use algorithms that always give the same result, or raise if there is none.

    Raises:
        TypeError: the seed is no integer.
        ValueError: it is negative or too large.

    Example:
        >>> import torch
        >>> set_seed(1); first = torch.rand(1)
        >>> set_seed(1); bool(torch.rand(1) == first)
        True

    Source: https://pytorch.org/docs/stable/notes/randomness.html
    """
    try:
        value = index(seed)
    except TypeError:
        raise TypeError(f"seed={seed!r} is of type {type(seed).__name__}; pass an integer.") from None
    if not 0 <= value <= _LARGEST_SEED:
        raise ValueError(f"seed={value} is out of range; pass an integer from 0 to {_LARGEST_SEED} (2**32 - 1).")
    if device_specific:
        layout = storage.accelerator.current.get("parallelism_config")
        # The ranks of tensor parallelism are innermost in the mesh.
        place = storage.process.filled()["process_index"] // (layout.tp_size if layout is not None else 1)
        value = (value + place) % (_LARGEST_SEED + 1)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)  # CUDA, XPU and MPS, too
    device = detect()
    if device.type not in ("cpu", "cuda", "xpu", "mps"):
        device.manual_seed_all(value)
    if deterministic:
        # cuBLAS reads it when it starts; without it, torch refuses matrix products in this mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give all processes the state that a random generator has on the main process.

    Collective: call on every rank.

    Args:
        rng_type: which generator: "torch", "generator", or a device such as "cuda". None does nothing, and neither does a word in
            place of a member of `RNGType` where there is one process.
        generator: the generator to synchronise, for "generator".

    Raises:
        ValueError: the type is unknown.
        AssertionError: "generator" is requested without one, or a device that this machine does not have.
    """
    communicator = comm.current()
    alone = communicator.world_size == 1
    if rng_type is None or (alone and not isinstance(rng_type, RNGType)):
        return
    rng_type = RNGType(rng_type)
    if rng_type is RNGType.GENERATOR:
        if generator is None:
            raise AssertionError("rng_type='generator' needs a generator; pass `generator=torch.Generator()`.")
        get, put = generator.get_state, generator.set_state
    elif rng_type is RNGType.TORCH:
        get, put = torch.get_rng_state, torch.set_rng_state
    else:
        device = DEVICES.get(rng_type.value)
        if device is None or not device.available():
            raise AssertionError(
                f"rng_type={rng_type.value!r} asks for the generator of a device that this machine does not have. Omit it."
            )
        get, put = device.get_rng_state, device.set_rng_state
    if alone:
        return
    state = get()
    if isinstance(state, torch.Tensor):
        put(communicator.broadcast(state, 0).cpu())
    else:
        put(int(communicator.broadcast(torch.tensor([state], dtype=torch.int64), 0)))


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Do `synchronize_rng_state` for several generators, in the same order on every rank.

    Collective: call on every rank.

    Example:
        >>> from accelerate.utils import synchronize_rng_states
        >>> synchronize_rng_states(["torch"])  # all ranks draw the numbers of rank 0 now
    """
    for rng_type in rng_types:
        synchronize_rng_state(RNGType(rng_type), generator=generator)
