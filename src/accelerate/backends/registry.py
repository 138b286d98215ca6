"""Which backend serves a state: ordered specs, matched late, loaded on first use, open to third parties."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from accelerate.backends.base import Backend
from accelerate.config.enums import DistributedType

GROUP = "accelerate.backends"


@dataclass(frozen=True)
class BackendSpec:
    """How a backend is found.

    Attributes:
        name: The backend's name.
        matches: Says of an AcceleratorState whether this backend serves it.
        target: ``"module:Class"``, imported on first use.
    """

    name: str
    matches: Callable[[Any], bool]
    target: str


_REPLICAS = frozenset(kind for kind in DistributedType if kind.value.startswith("MULTI_"))


def _serves(*kinds: DistributedType) -> Callable[[Any], bool]:
    return lambda state: state.distributed_type in kinds


def _splits_layers(state: Any) -> bool:
    layout = getattr(state, "parallelism_config", None)
    return state.distributed_type in _REPLICAS and layout is not None and layout.tp_enabled


def _divides_layers(state: Any) -> bool:
    layout = getattr(state, "parallelism_config", None)
    return layout is not None and layout.pp_enabled


SPECS: list[BackendSpec] = [
    BackendSpec("megatron", _serves(DistributedType.MEGATRON_LM), "accelerate.backends.megatron.backend:MegatronLM"),
    BackendSpec("pipeline", _divides_layers, "accelerate.backends.pipeline:PipelineParallel"),
    BackendSpec("single", _serves(DistributedType.NO), "accelerate.backends.base:SingleProcess"),
    BackendSpec("tensor_parallel", _splits_layers, "accelerate.backends.sharded:TensorParallel"),
    BackendSpec("ddp", _serves(*_REPLICAS), "accelerate.backends.ddp:DataParallel"),
    BackendSpec("xla", _serves(DistributedType.XLA), "accelerate.backends.ddp:XLA"),
    BackendSpec("fsdp2", lambda state: getattr(state, "is_fsdp2", False), "accelerate.backends.sharded:FSDP2"),
    BackendSpec("fsdp1", _serves(DistributedType.FSDP), "accelerate.backends.fsdp1:FSDP1"),
    BackendSpec("deepspeed", _serves(DistributedType.DEEPSPEED), "accelerate.backends.deepspeed.engine:DeepSpeed"),
]


def register(spec: BackendSpec, before: str | None = None) -> None:
    """Add a backend, in front of the one it refines.

    Args:
        spec: The backend; its ``matches`` is asked before those behind it.
        before: Name of the backend it goes in front of; None puts it first.

    Raises:
        ValueError: ``before`` names no backend; the message lists the known ones.
    """
    names = [known.name for known in SPECS]
    if before is not None and before not in names:
        raise ValueError(f"before={before!r} is no registered backend. Known: {names}.")
    SPECS.insert(0 if before is None else names.index(before), spec)


@cache
def load(name: str) -> Backend:
    """Return the backend of a name, imported on first use; ValueError if unknown."""
    _third_parties()
    spec = next((spec for spec in SPECS if spec.name == name), None)
    if spec is None:
        raise ValueError(f"There is no backend {name!r}. Known: {[spec.name for spec in SPECS]}.")
    module, _, attribute = spec.target.partition(":")
    return getattr(importlib.import_module(module), attribute)()


@cache
def _third_parties() -> None:
    for point in entry_points(group=GROUP):
        register(point.load())


def resolve(state: Any) -> Backend:
    """Return the backend that serves a state now; the state may have changed since the last call."""
    _third_parties()
    for spec in SPECS:
        if spec.matches(state):
            return load(spec.name)
    names = [spec.name for spec in SPECS]
    raise ValueError(f"No backend serves distributed_type={state.distributed_type!r}. Known: {names}.")
