"""Reading an optimizer's state into the shards and groups of another optimizer of the same parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import fsdp_state
from accelerate.checkpoint.dcp import Reader, Steps
from accelerate.checkpoint.fsdp_files import Found, read_names
from accelerate.checkpoint.manifest import DamagedCheckpoint


@dataclass(frozen=True)
class Target:
    """What an optimizer needs.

    Attributes:
        groups: names of its parameters, for each group.
        parameters: a tensor by name for each of them, with the shards that this rank has. It is no copy.
        states: what the optimizer has for each name already, where it says more than the parameter does.
        ties: names that mean one parameter.
    """

    groups: list[list[str]]
    parameters: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]
    ties: Sequence[Sequence[str]]

    def parameters_in_groups(self) -> list[str]:
        """Return the names of all parameters, group by group."""
        return [name for group in self.groups for name in group]

    def also_called(self, name: str) -> Iterator[str]:
        """Yield the names of a parameter, its own first."""
        yield name
        for group in self.ties:
            if name in group:
                yield from (other for other in group if other != name)


def target(optimizer: torch.optim.Optimizer, model: nn.Module) -> Target:
    """Return what an optimizer needs. All ranks.

    Args:
        optimizer: wrapped or not.
        model: the model that it updates, of any kind.
    """
    groups = fsdp_state.parameter_names(optimizer, model)
    if fsdp_state.is_fsdp1(model):
        return Target(groups, fsdp_state.model_state(model).values, {}, fsdp_state.tied_names(model))
    inner = fsdp_state.inner_optimizer(optimizer)
    own = [parameter for group in inner.param_groups for parameter in group["params"]]
    named = dict(zip((name for group in groups for name in group), own, strict=True))
    states = {name: inner.state[parameter] for name, parameter in named.items() if parameter in inner.state}
    return Target(groups, named, states, fsdp_state.tied_names(model))


@fsdp_state.quietly()
def read(goal: Target, found: Found) -> dict[str, Any]:
    """Read an optimizer's state into new memory, each rank its shards; nothing else changes. Any rank, alone.

    Args:
        goal: what the optimizer needs.
        found: where it is stored, in whatever layout.

    Returns:
        The state, keyed by the optimizer's own names, in its own groups.

    Raises:
        RuntimeError: it is the state of other parameters; the message tells which.
        DamagedCheckpoint: a file is damaged.
    """
    if found.layout == "local":
        return _local(goal, found)
    reader = found.reader()
    states, groups = stored(reader)
    if any(isinstance(name, int) for group in groups for name in group["params"]):
        states, groups = named(states, groups, _names_for(goal, found, groups))
    options = _own_groups(goal, groups, reader.origin)
    saved = {name for group in groups for name in group["params"]}
    wanted: dict[str, Any] = {}
    places: list[tuple[str, Steps, str]] = []
    for name in goal.parameters_in_groups():
        source = next((other for other in goal.also_called(name) if other in saved), name)
        for steps, key in states.get(source, {}).items():
            wanted[key] = _memory(goal, name, steps, reader.metadata.state_dict_metadata[key], reader.origin)
            places.append((name, steps, key))
    filled = reader.fill(wanted)
    result: dict[str, Any] = {}
    for name, steps, key in places:
        put(result.setdefault(name, {}), steps, filled[key])
    return {"state": {name: lists(value) for name, value in result.items()}, "param_groups": options}


# -- what is stored ----------------------------------------------------------------------------------------------------


def stored(reader: Reader) -> tuple[dict[Any, dict[Steps, str]], list[dict[str, Any]]]:
    """Return what is stored of an optimizer. Any rank, alone.

    Args:
        reader: of an optimizer's files.

    Returns:
        For each parameter, by name or number, the keys of its values by the steps that lead to them; and the groups.

    Raises:
        DamagedCheckpoint: it is no state of an optimizer.
    """
    states: dict[Any, dict[Steps, str]] = {}
    options: dict[str, Steps] = {}
    for steps, key in reader.specs():
        steps = steps[1:] if steps[0] == "optimizer" else steps
        if steps[0] == "state" and len(steps) > 2:
            states.setdefault(steps[1], {})[steps[2:]] = key
        elif steps[0] == "param_groups" and len(steps) > 1:
            options[key] = steps[1:]
        elif steps != ("state",):  # which is empty, if the optimizer has not stepped
            raise DamagedCheckpoint(f"{reader.origin} holds {key}, which no optimizer has.")
    specs = reader.metadata.state_dict_metadata
    memory = {
        key: torch.empty(specs[key].size, dtype=specs[key].properties.dtype) if hasattr(specs[key], "size") else None
        for key in options
    }
    nested: dict[Any, Any] = {}
    for key, value in reader.fill(memory).items():
        put(nested, options[key], value)
    groups = [nested[number] for number in sorted(nested)] if all(isinstance(n, int) for n in nested) else []
    if not groups or not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise DamagedCheckpoint(f"{reader.origin} has no groups of parameters: it is no state of an optimizer.")
    return states, [lists(group) for group in groups]


def named(
    states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an optimizer's state keyed by names instead of numbers.

    Args:
        states: by number.
        groups: with numbers.
        names: of the parameters, in the order of the numbers in the groups.
    """
    order = dict(zip((number for group in groups for number in group["params"]), names, strict=True))
    kept = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    kept = [{**group, "params": [order[number] for number in group["params"]]} for group in kept]
    return {order[number]: value for number, value in states.items() if number in order}, kept


def told_names(folder: str, index: int, groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the names of numbered parameters, if the checkpoint tells them. Any rank, alone.

    Args:
        folder: the checkpoint's folder.
        index: which of the optimizers it is.
        groups: its groups.
    """
    told = read_names(folder, index)
    if told is None and all("param_names" in group for group in groups):
        told = [list(group["param_names"]) for group in groups]
    if told is None or [len(group) for group in told] != [len(group["params"]) for group in groups]:
        return None
    return [name for group in told for name in group]


# -- fitting it to the optimizer ---------------------------------------------------------------------------------------


def _names_for(goal: Target, found: Found, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of numbered parameters: those the checkpoint tells, else the optimizer's own, as torch takes them."""
    told = told_names(found.folder, found.index, groups)
    if told is not None:
        return told
    counts = [len(group["params"]) for group in groups], [len(group) for group in goal.groups]
    if counts[0] != counts[1]:
        raise RuntimeError(
            f"{found.name} in {found.folder!r} has groups of {counts[0]} parameters, and this optimizer of {counts[1]}; "
            "nothing was loaded. Make the optimizer as it was when the checkpoint was saved."
        )
    return [name for group in goal.groups for name in group]


def _own_groups(goal: Target, groups: Sequence[Mapping[str, Any]], origin: str) -> list[dict[str, Any]]:
    """Return the optimizer's own groups with the stored options: a group has those of the parameters in it."""
    home = {name: number for number, group in enumerate(groups) for name in group["params"]}
    found, missing = [], []
    for number, names in enumerate(goal.groups):
        homes = [next((home[other] for other in goal.also_called(name) if other in home), None) for name in names]
        missing += [name for name, place in zip(names, homes, strict=True) if place is None]
        places = {place for place in homes if place is not None}
        if len(places) > 1:
            raise RuntimeError(
                f"Group {number} of the optimizer has parameters that are in groups {sorted(places)} in {origin}; nothing was "
                "loaded. Make the groups as they were when the checkpoint was saved."
            )
        source = groups[places.pop()] if places else groups[min(number, len(groups) - 1)]
        # The names which torch keeps beside the numbers are the optimizer's own.
        options = {key: value for key, value in source.items() if key not in ("params", "param_names")}
        found.append({**options, "params": list(names)})
    if missing:
        raise RuntimeError(
            f"{origin} has no state for {len(missing)} parameters of the optimizer; nothing was loaded: "
            f"{', '.join(missing[:10])}. Make model and optimizer as they were when the checkpoint was saved."
        )
    return found


def _memory(goal: Target, name: str, steps: Steps, spec: Any, origin: str) -> Any:
    """Return memory for a value: sharded like the parameter if it has its shape, else whole."""
    size = getattr(spec, "size", None)
    if size is None:
        return None
    dtype, own = spec.properties.dtype, goal.parameters[name]
    if not fsdp_state.is_spread(own):
        if not _fits(size, own.shape):
            raise RuntimeError(_misfit(name, steps, size, own.shape, origin))
        return torch.empty(size, dtype=dtype)
    if not len(size):
        return torch.empty(size, dtype=dtype)
    if size == own.size():
        return fsdp_state.like(own, dtype)
    present = goal.states.get(name, {}).get(steps[0]) if len(steps) == 1 else None
    if isinstance(present, torch.Tensor) and present.size() == size:
        return fsdp_state.like(present, dtype)
    raise RuntimeError(_misfit(name, steps, size, own.size(), origin))


def _fits(stored: Sequence[int], own: Sequence[int]) -> bool:
    """Say whether a value may belong to a parameter: some optimizers keep one for each row or column, or only for all."""
    return len(stored) != len(own) or all(count in (1, whole) for count, whole in zip(stored, own, strict=True))


def _misfit(name: str, steps: Steps, stored: Sequence[int], own: Sequence[int], origin: str) -> str:
    return (
        f"{'.'.join(map(str, steps))} of {name} has the shape {tuple(stored)} in {origin}, and the parameter {tuple(own)}; "
        "nothing was loaded. If the optimizer keeps values of other shapes than its parameters, let it step once before "
        "loading, which shows how they are sharded."
    )


def _local(goal: Target, found: Found) -> dict[str, Any]:
    """Return the state that this rank wrote for its own shards."""
    raw = found.of_rank()
    if not isinstance(raw, Mapping) or not isinstance(raw.get("state"), Mapping):
        raise DamagedCheckpoint(f"{found.name} in {found.folder!r} is no state of an optimizer.")
    groups = _own_groups(goal, raw["param_groups"], found.name)
    state: dict[str, Any] = {}
    for name in goal.parameters_in_groups():
        source = next((other for other in goal.also_called(name) if other in raw["state"]), None)
        for key, value in raw["state"].get(source, {}).items():
            own = goal.parameters[name]
            if isinstance(value, torch.Tensor) and value.dim() and fsdp_state.is_spread(own):
                mine, theirs = fsdp_state.like(own, value.dtype), fsdp_state.part(value)
                if fsdp_state.part(mine).numel() != theirs.numel():
                    raise RuntimeError(_misfit(name, (key,), theirs.shape, fsdp_state.part(mine).shape, found.name))
                fsdp_state.part(mine).view(-1).copy_(theirs.reshape(-1))
                value = mine
            elif isinstance(value, torch.Tensor) and not _fits(value.shape, own.shape):
                raise RuntimeError(_misfit(name, (key,), value.shape, own.shape, found.name))
            state.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": groups}


# -- nested values -----------------------------------------------------------------------------------------------------


def put(target: dict[Any, Any], steps: Steps, value: Any) -> None:
    """Put a value where steps lead, through dictionaries that are made on the way.

    Args:
        target: the outermost dictionary.
        steps: at least one.
        value: anything.
    """
    for step in steps[:-1]:
        target = target.setdefault(step, {})
    target[steps[-1]] = value


def lists(value: Any) -> Any:
    """Return nested dictionaries in which those with the keys 0, 1, 2, ... are lists again.

    Args:
        value: what `put` made, without its outermost dictionaries, whose keys may be numbers.
    """
    if not isinstance(value, dict):
        return value
    made = {key: lists(child) for key, child in value.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[number] for number in range(len(made))]
    return made
