"""Reading an optimizer's state into the shards and groups of another optimizer of the same parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import dcp, fsdp_state, readers
from accelerate.checkpoint.dcp import Steps
from accelerate.checkpoint.fsdp_files import Found, read_names
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.readers import Reader
from accelerate.modules.named import match_names


@dataclass(frozen=True)
class Target:
    """What an optimizer needs.

    Attributes:
        groups: names of its parameters, for each group.
        parameters: a tensor by name for each of them, with the shards that this rank has. It is no copy.
        states: what the optimizer has for each name already, where it says more than the parameter does.
        ties: names that mean one parameter.
        flat: its parameters are FSDP1's flat ones, which have an order of their own.
    """

    groups: list[list[str]]
    parameters: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]
    ties: Sequence[Sequence[str]]
    flat: bool = False

    def parameters_in_groups(self) -> list[str]:
        """Return the names of all parameters, group by group."""
        return [name for group in self.groups for name in group]

    def sources(self, saved: Iterable[str]) -> dict[str, str]:
        """Return the names of all parameters, and of each the name under which it was saved.

        Args:
            saved: the names that were saved.
        """
        saved = set(saved)
        return {
            name: next((other for other in self.also_called(name) if other in saved), name)
            for name in self.parameters_in_groups()
        }

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
    inner = fsdp_state.inner_optimizer(optimizer)
    if fsdp_state.is_fsdp1(model):
        flat = any(hasattr(parameter, "_fqns") for group in inner.param_groups for parameter in group["params"])
        return Target(groups, fsdp_state.model_state(model).values, {}, fsdp_state.tied_names(model), flat)
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
    options = _own_groups(goal, groups, [name for name, keys in states.items() if keys], reader.origin)
    specs = reader.metadata.state_dict_metadata
    sources = goal.sources(name for group in groups for name in group["params"])
    wanted: dict[str, Any] = {}
    places: list[tuple[Any, Steps, str]] = []
    for name, source in sources.items():
        for steps, key in states.pop(source, {}).items():
            wanted[key] = _memory(goal, name, steps, specs[key], reader.origin)
            places.append((name, steps, key))
    for name, keys in states.items():  # what belongs to no parameter
        wanted |= {key: readers.memory_of(specs[key]) for key in keys.values()}
        places += [(name, steps, key) for steps, key in keys.items()]
    filled = reader.fill(wanted)
    values: dict[Any, dict[Steps, Any]] = {}
    for name, steps, key in places:
        values.setdefault(name, {})[steps] = filled[key]
    result = {name: dcp.nested(parts, reader.origin) for name, parts in values.items()}
    return {"state": result, "param_groups": options}


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
        steps = steps[1:] if steps[:1] == ("optimizer",) else steps
        if steps[:1] == ("state",) and len(steps) > 1:
            states.setdefault(steps[1], {})[steps[2:]] = key
        elif steps[:1] == ("param_groups",) and len(steps) > 1:
            options[key] = steps[1:]
        elif steps != ("state",):  # which is empty, if the optimizer has not stepped
            raise DamagedCheckpoint(f"{reader.origin} holds {key!r}, which no optimizer has.")
    values = reader.whole(options)
    groups = dcp.nested({steps: values[key] for key, steps in options.items()}, reader.origin)
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise DamagedCheckpoint(f"{reader.origin} has no groups of parameters: it is no state of an optimizer.")
    return states, groups


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)


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
    order |= {str(number): name for number, name in order.items()}  # torch makes the keys of shards texts
    states = {key: value for key, value in states.items() if key in order or not isinstance(key, int)}
    return {order.get(key, key): value for key, value in states.items()}, kept


def told_names(
    folder: str, index: int, groups: Sequence[Mapping[str, Any]], own: Sequence[str] | None = None
) -> list[str] | None:
    """Return the names of numbered parameters, if the checkpoint tells them. Any rank, alone.

    Args:
        folder: the checkpoint's folder.
        index: which of the optimizers it is.
        groups: its groups.
        own: names of the optimizer that is going to load it. Those that torch keeps in the groups are whatever the optimizer was
            made with, so they count only if all of them mean one of these.
    """
    told = read_names(folder, index)
    if told is None and all("param_names" in group for group in groups):
        told = [list(group["param_names"]) for group in groups]
        if own is not None:
            pairs = match_names(own, [name for group in told for name in group])
            told = [[pairs[name] for name in group] for group in told if all(name in pairs for name in group)]
    if told is None or [len(group) for group in told] != [len(group["params"]) for group in groups]:
        return None
    return [name for group in told for name in group]


# -- fitting it to the optimizer ---------------------------------------------------------------------------------------


def _names_for(goal: Target, found: Found, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of numbered parameters: those the checkpoint tells, else the optimizer's own, as torch takes them."""
    told = told_names(found.folder, found.index, groups, goal.parameters_in_groups())
    if told is not None:
        return told
    if goal.flat and len(goal.parameters_in_groups()) > 1:
        raise RuntimeError(
            f"{found.name} in {found.folder!r} numbers its parameters and nothing tells their names, and this optimizer's "
            "parameters are flat, in an order of their own; nothing was loaded. Wrap the model with use_orig_params=True to "
            "load it, or save it once more without FSDP: that tells the names."
        )
    counts = [len(group["params"]) for group in groups], [len(group) for group in goal.groups]
    if counts[0] != counts[1]:
        raise RuntimeError(
            f"{found.name} in {found.folder!r} has groups of {counts[0]} parameters, and this optimizer of {counts[1]}; "
            "nothing was loaded. Make the optimizer as it was when the checkpoint was saved."
        )
    return [name for group in goal.groups for name in group]


def _own_groups(
    goal: Target, groups: Sequence[Mapping[str, Any]], states: Iterable[Any], origin: str
) -> list[dict[str, Any]]:
    """Return the optimizer's own groups with the stored options: a group has those of the parameters in it.

    Args:
        goal: what the optimizer needs.
        groups: the stored ones, with names.
        states: names of what has a state there.
        origin: for messages.
    """
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
    known = {other for name in goal.parameters_in_groups() for other in goal.also_called(name)}
    lost = [name for name in states if name in home and name not in known]
    if lost:
        raise RuntimeError(
            f"{origin} has a state for {len(lost)} parameters that the optimizer does not have; nothing was loaded: "
            f"{', '.join(lost[:10])}. Make model and optimizer as they were when the checkpoint was saved."
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
    if not is_state(raw):
        raise DamagedCheckpoint(f"{found.name} in {found.folder!r} is no state of an optimizer.")
    return arranged(goal, raw, found.name)


def is_state(raw: Any) -> bool:
    """Say whether a value has the form that optimizers of torch give their states.

    Args:
        raw: anything.
    """
    groups = raw.get("param_groups") if isinstance(raw, Mapping) and isinstance(raw.get("state"), Mapping) else None
    return isinstance(groups, list) and all(map(_is_group, groups))


def arranged(goal: Target, raw: Mapping[str, Any], origin: str, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a state that is in memory keyed by the optimizer's own names, in its own groups. Any rank, alone.

    Args:
        goal: what the optimizer needs.
        raw: the state of whole tensors, or of those that this rank wrote of its own shards.
        origin: where it comes from, for messages.
        names: of the parameters, in the order of the numbers in the groups; by default those are names.

    Raises:
        RuntimeError: it is the state of other parameters; the message tells which.
    """
    states, groups = dict(raw["state"]), raw["param_groups"]
    if names is not None:
        states, groups = named(states, groups, names)
    options = _own_groups(goal, groups, [name for name, values in states.items() if values], origin)
    result: dict[Any, Any] = {}
    for name, source in goal.sources(name for group in groups for name in group["params"]).items():
        values = states.pop(source, None)
        if isinstance(values, Mapping):
            result[name] = {key: _own_part(goal, name, key, value, origin) for key, value in values.items()}
    return {**raw, "state": {**result, **states}, "param_groups": options}


def _own_part(goal: Target, name: str, key: Any, value: Any, origin: str) -> Any:
    """Return a value with the shards of its parameter, if it has the shape of what this rank has of that."""
    if not isinstance(value, torch.Tensor):
        return value
    own = goal.parameters[name]
    if fsdp_state.is_spread(own) and value.dim():
        mine = fsdp_state.filled_like(own, value)
        if mine is None:
            raise RuntimeError(_misfit(name, (key,), fsdp_state.part(value).shape, fsdp_state.part(own).shape, origin))
        return mine
    if not fsdp_state.is_spread(value) and not _fits(value.shape, own.shape):
        raise RuntimeError(_misfit(name, (key,), value.shape, own.shape, origin))
    # FSDP1 writes one step count for all parameters of a unit; shared in memory, it would be counted up once for each of them.
    return value if value.dim() else value.clone()
