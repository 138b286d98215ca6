"""Random states of a process: Python, numpy, torch, and the devices."""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerate.data import randomness
from accelerate.devices.table import DEVICES

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """A random generator that a checkpoint remembers.

    Attributes:
        key: Its name in the file.
        label: Its name in messages.
        get: Returns its state.
        set: Takes a state back.
    """

    key: str
    label: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


def sources(device: torch.device) -> Iterator[Source]:
    """Yield the generators of this process; of the devices only that of the run: asking for another one's state would start it up.

    Args:
        device: The device of this rank.
    """
    yield Source("random_state", "Python", random.getstate, random.setstate)
    yield Source("numpy_random_seed", "numpy", np.random.get_state, np.random.set_state)
    yield Source("torch_manual_seed", "torch (CPU)", torch.get_rng_state, torch.set_rng_state)
    if device.type not in ("cpu", "mps"):
        row = DEVICES[device.type]
        key, name = ("xm_seed", "XLA") if device.type == "xla" else (f"torch_{device.type}_manual_seed", device.type)
        yield Source(key, f"torch ({name})", row.get_rng_state_all, row.set_rng_state_all)


def collect(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator of this process, by the key it has in a checkpoint. Any rank, alone.

    Args:
        device: The device of this rank.
    """
    return {source.key: source.get() for source in sources(device)}


def encode(states: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return states of generators as tensors and texts, for a file that holds no pickle. Any rank, alone.

    Args:
        states: What ``collect`` returned.

    Returns:
        Tensors by name, and metadata: under ``"generators"`` what else belongs to each state, as JSON.
    """
    tensors: dict[str, torch.Tensor] = {}
    more: dict[str, Any] = {}
    for key, state in states.items():
        if key == "random_state":
            version, words, gauss = state
            tensors[key], more[key] = torch.tensor(words, dtype=torch.int64), {"version": version, "gauss": gauss}
        elif key == "numpy_random_seed" and isinstance(state, dict):  # the program has chosen another bit generator
            more[key] = {"state": state}
        elif key == "numpy_random_seed":
            kind, words, position, has_gauss, gauss = state
            tensors[key] = torch.from_numpy(np.asarray(words).astype(np.int64))
            more[key] = {"kind": kind, "position": position, "has_gauss": has_gauss, "gauss": gauss}
        elif isinstance(state, torch.Tensor):
            tensors[key], more[key] = state.cpu(), {}
        elif isinstance(state, (list, tuple)):  # of every device
            tensors |= {f"{key}.{index}": part.cpu() for index, part in enumerate(state)}
            more[key] = {"devices": len(state)}
        else:
            more[key] = {"value": state}
    return tensors, {"format": "pt", "generators": json.dumps(more, default=_to_json)}


def decode(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the states that ``encode`` was given; for one that cannot be read, the error. Any rank, alone.

    Args:
        tensors: From ``encode``.
        metadata: From ``encode``.
    """
    try:
        described = dict(json.loads(metadata["generators"], object_hook=_from_json))
    except (KeyError, ValueError, TypeError) as error:
        problem = ValueError(f"the description of the generators is unreadable ({type(error).__name__}: {error})")
        return {source.key: problem for source in sources(torch.device("cpu"))}
    states = {}
    for key, more in described.items():
        try:
            states[key] = _decoded(key, more, tensors)
        except Exception as error:
            states[key] = error
    return states


def _decoded(key: str, more: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    if key == "random_state":
        return more["version"], tuple(tensors[key].tolist()), more["gauss"]
    if "kind" in more:
        words = tensors[key].numpy().astype(np.uint32)
        return more["kind"], words, more["position"], more["has_gauss"], more["gauss"]
    if "devices" in more:
        return [tensors[f"{key}.{index}"] for index in range(more["devices"])]
    if "state" in more:
        return more["state"]
    return more["value"] if "value" in more else tensors[key]


def _to_json(value: Any) -> Any:
    """Return what JSON has for a value of numpy's."""
    return {"array": value.tolist(), "dtype": str(value.dtype)} if isinstance(value, np.ndarray) else value.item()


def _from_json(value: dict[str, Any]) -> Any:
    """Return what `_to_json` was given."""
    return np.array(value["array"], value["dtype"]) if value.keys() == {"array", "dtype"} else value


def restore(states: dict[str, Any], device: torch.device, origin: str) -> None:
    """Set every generator that the states have; one that cannot be set is warned about, and the others still are.

    Any rank, alone.

    Args:
        states: What ``collect`` or ``decode`` returned.
        device: The device of this rank.
        origin: Where the states come from, for messages.
    """
    for source in sources(device):
        if source.key not in states:
            logger.warning(
                "%s has no random state for %s, so a resumed run draws other numbers from it.", origin, source.label
            )
            continue
        try:
            if isinstance(state := states[source.key], Exception):
                raise state
            source.set(_on_cpu(state))
        except Exception as error:
            logger.warning(
                f"The random state of {source.label} in {origin} could not be restored, so a resumed run draws "
                f"other numbers from it: {type(error).__name__}: {error}"
            )


def derive(first: dict[str, Any], rank: int, device: torch.device, reason: str) -> None:
    """Seed the generators of a rank that was not there when the checkpoint was saved; equal runs seed it alike.

    Any rank, alone.

    Args:
        first: Random states of the first rank, from the checkpoint.
        rank: This rank.
        device: Its device.
        reason: Why, for the log.
    """
    states = first.get("torch_manual_seed")
    digest = hashlib.blake2b(b"" if states is None else bytes(_on_cpu(states).tolist()), digest_size=8, salt=b"rank")
    digest.update(str(rank).encode())
    seed = int.from_bytes(digest.digest(), "little") >> 1
    logger.warning(
        f"{reason}: the checkpoint was saved by fewer processes. Rank {rank} is new and seeds its random generators "
        f"with {seed}, derived from those of the first rank."
    )
    randomness.seed_all(seed)
    if device.type not in ("cpu", "mps", "xla"):
        DEVICES[device.type].manual_seed_all(seed)


def _on_cpu(state: Any) -> Any:
    """Generators take their state from the CPU, whatever device it was loaded to."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, list):
        return [_on_cpu(item) for item in state]
    return state
