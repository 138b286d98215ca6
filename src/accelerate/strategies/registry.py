"""The strategy that serves a state: matched late, imported on first use. The records are in `config.strategies`."""

from functools import cache
from typing import TYPE_CHECKING, Any

from accelerate.config import strategies
from accelerate.extension import imported
from accelerate.strategies.base import Strategy

if TYPE_CHECKING:
    from accelerate.strategies.state_io import StateIO


@cache
def load(name: str) -> Strategy:
    """Return the strategy of a name, imported on first use; ValueError if unknown."""
    strategy: Strategy = imported(_spec(name).strategy)()
    strategy.name = name
    return strategy


@cache
def load_state_io(name: str) -> "StateIO":
    """Return a strategy's `StateIO`, by its name, imported on first use; ValueError if unknown."""
    state_io: StateIO = imported(_spec(name).state_io)()
    return state_io


def _spec(name: str) -> strategies.StrategySpec:
    strategies.third_parties()
    spec = next((spec for spec in strategies.specs() if spec.name == name), None)
    if spec is None:
        registered = [spec.name for spec in strategies.specs()]
        raise ValueError(
            f"There is no strategy {name!r}: its extension is not installed, or the name is wrong. Known: {registered}."
        )
    return spec


def resolve(state: Any) -> Strategy:
    """Return the strategy that serves a state now; the state may have changed since the last call."""
    strategies.third_parties()
    if (spec := strategies.serving(state)) is not None:
        return load(spec.name)
    names = [spec.name for spec in strategies.specs()]
    raise ValueError(
        f"No strategy that is installed serves distributed_type={state.distributed_type!r}. Known: {names}."
    )
