"""Which strategy serves a state: ordered specs, matched late, loaded on first use, open to third parties."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from accelerate.config.enums import DistributedType
from accelerate.strategies.base import Strategy

GROUP = "accelerate.backends"


@dataclass(frozen=True)
class StrategySpec:
    """How a strategy is found.

    Attributes:
        name: The strategy's name.
        matches: Says of an AcceleratorState whether this strategy serves it.
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


SPECS: list[StrategySpec] = [
    StrategySpec(
        "megatron", _serves(DistributedType.MEGATRON_LM), "accelerate.strategies.megatron.strategy:MegatronLM"
    ),
    StrategySpec("pipeline", _divides_layers, "accelerate.strategies.pipeline:PipelineParallel"),
    StrategySpec("single", _serves(DistributedType.NO), "accelerate.strategies.base:SingleProcess"),
    StrategySpec("tensor_parallel", _splits_layers, "accelerate.strategies.sharded:TensorParallel"),
    StrategySpec("ddp", _serves(*_REPLICAS), "accelerate.strategies.ddp:DataParallel"),
    StrategySpec("xla", _serves(DistributedType.XLA), "accelerate.strategies.ddp:XLA"),
    StrategySpec("fsdp2", lambda state: getattr(state, "is_fsdp2", False), "accelerate.strategies.sharded:FSDP2"),
    StrategySpec("fsdp1", _serves(DistributedType.FSDP), "accelerate.strategies.fsdp1:FSDP1"),
    StrategySpec("deepspeed", _serves(DistributedType.DEEPSPEED), "accelerate.strategies.deepspeed.engine:DeepSpeed"),
]


def register(spec: StrategySpec, before: str | None = None) -> None:
    """Add a strategy, in front of the one it refines.

    Args:
        spec: The strategy; its ``matches`` is asked before those behind it.
        before: Name of the strategy it goes in front of; None puts it first.

    Raises:
        ValueError: ``before`` names no strategy; the message lists the known ones.
    """
    names = [known.name for known in SPECS]
    if before is not None and before not in names:
        raise ValueError(f"before={before!r} is no registered strategy. Known: {names}.")
    SPECS.insert(0 if before is None else names.index(before), spec)


@cache
def load(name: str) -> Strategy:
    """Return the strategy of a name, imported on first use; ValueError if unknown."""
    _third_parties()
    spec = next((spec for spec in SPECS if spec.name == name), None)
    if spec is None:
        raise ValueError(f"There is no strategy {name!r}. Known: {[spec.name for spec in SPECS]}.")
    module, _, attribute = spec.target.partition(":")
    return getattr(importlib.import_module(module), attribute)()


@cache
def _third_parties() -> None:
    for point in entry_points(group=GROUP):
        register(point.load())


def resolve(state: Any) -> Strategy:
    """Return the strategy that serves a state now; the state may have changed since the last call."""
    _third_parties()
    for spec in SPECS:
        if spec.matches(state):
            return load(spec.name)
    names = [spec.name for spec in SPECS]
    raise ValueError(f"No strategy serves distributed_type={state.distributed_type!r}. Known: {names}.")
