"""Optimizers in a checkpoint: reading any stored state into the shards and groups of an optimizer of the same parameters.

The names of parameters connect the two, as the numbers in an optimizer's state do not.
"""

import functools
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import manifest, model_io, state
from accelerate.checkpoint.apply import uses_torch_load
from accelerate.checkpoint.layouts import Found, Path, required, to_device
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.model_io import inner_optimizer, io_of
from accelerate.checkpoint.state import Layout, is_distributed_tensor, mapped_leaves, run_on_all_ranks
from accelerate.checkpoint.stored import Plan, Reader, StoredTensor
from accelerate.modules import tensor_kinds
from accelerate.modules.unwrap import match_names

_REMEDY = "Make model and optimizer as they were when the checkpoint was saved."

# -- names of parameters -----------------------------------------------------------------------------------------------


def read_names(folder: Path, index: int = 0) -> list[list[str]] | None:
    """Return the names of an optimizer's parameters that a checkpoint has, for each group, or None.

    Not a collective.
    """
    path = os.path.join(folder, manifest.PARAMETER_NAMES)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            groups: Any = json.load(file).get(str(index))
    except (ValueError, AttributeError):
        groups = False
    is_listed = type(groups) is list and {list}.issuperset(map(type, groups))
    if groups is not None and not (is_listed and {str}.issuperset(map(type, itertools.chain(*groups)))):
        raise DamagedCheckpoint(f"{path} does not hold names for optimizer {index}.")
    names: list[list[str]] | None = groups
    return names


# -- what is stored, and what is needed --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What an optimizer needs.

    Attributes:
        groups: names of its parameters, for each group.
        parameters: a tensor by name for each of them, with the shards that this rank has. It is no copy.
        states: what the optimizer has for each name already, where it says more than the parameter does.
        find_ties: returns groups of names that mean one parameter; asked when a name is not found.
        flat: its parameters are flat parameters, whose order differs from that of the model.
        elsewhere: names in the model that other stages of a pipeline have, whose optimizers read them.
    """

    groups: list[list[str]]
    parameters: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]
    find_ties: Callable[[], Sequence[Sequence[str]]]
    flat: bool = False
    elsewhere: Collection[str] = ()

    @functools.cached_property
    def order(self) -> list[str]:
        """The names of all parameters, group by group."""
        return list(itertools.chain.from_iterable(self.groups))

    @functools.cached_property
    def ties(self) -> Sequence[Sequence[str]]:
        """Groups of names that mean one parameter."""
        return self.find_ties()

    def also_called(self, name: str) -> list[str]:
        """Return the names of a parameter, its own first."""
        return [name, *(other for group in self.ties if name in group for other in group if other != name)]

    def sources(self, saved: Collection[str]) -> dict[str, str]:
        """Return the name under which each parameter was saved; its own if none was."""
        return {
            name: name if name in saved else next((other for other in self.also_called(name) if other in saved), name)
            for name in self.order
        }


def target(optimizer: torch.optim.Optimizer, model: nn.Module, groups: list[list[str]] | None = None) -> Target:
    """Return what an optimizer needs; `groups` are the names of its parameters, where they are known.

    Collective: call on every rank.
    """
    io = io_of(model)
    groups = io.parameter_names(optimizer, model) if groups is None else groups
    parameters, states, flat = io.optimizer_tensors(optimizer, model, groups)
    return Target(
        groups, parameters, states, functools.partial(io.tied_names, model), flat, elsewhere=io.elsewhere(model)
    )


def is_state(raw: Any) -> bool:
    """Return whether a value has the form that torch's optimizers give their states."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("state", {}), Mapping):
        return False
    groups = raw.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def optimizer_values(stored: Reader) -> dict[str, Any]:
    """Return the state of a stored optimizer."""
    raw = stored.state
    raw = raw["optimizer"] if isinstance(raw, Mapping) and set(raw) == {"optimizer"} else raw
    if not is_state(raw):
        raise DamagedCheckpoint(f"{stored.origin} has no groups of parameters: it is no state of an optimizer.")
    if is_named(raw):
        return {**raw, "state": raw.get("state", {})}
    # Torch makes the keys of shards texts.
    numbers = {str(number): number for group in raw["param_groups"] for number in group["params"]}
    return {**raw, "state": {numbers.get(key, key): value for key, value in raw.get("state", {}).items()}}


def saved_names(
    folder: Path, index: int, groups: Sequence[Mapping[str, Any]], own: Sequence[str] | None = None
) -> list[str] | None:
    """Return the names of numbered parameters, if the checkpoint has them. Not a collective."""
    found = read_names(folder, index)
    if found is None and all("param_names" in group for group in groups):
        found = [list(group["param_names"]) for group in groups]
        if own is not None:
            pairs = match_names(own, [name for group in found for name in group])
            found = [[pairs[name] for name in group] for group in found if all(name in pairs for name in group)]
    if found is None or [len(group) for group in found] != [len(group["params"]) for group in groups]:
        return None
    return [name for group in found for name in group]


def is_named(raw: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state is keyed by names."""
    return all({str}.issuperset(map(type, group["params"])) for group in raw["param_groups"])


def named(raw: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state keyed by names instead of numbers."""
    groups = raw["param_groups"]
    known = dict(zip((number for group in groups for number in group["params"]), order, strict=True))
    kept = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    states = {key: value for key, value in raw["state"].items() if key in known or not isinstance(key, int)}
    return {**raw, **model_io.renamed({"state": states, "param_groups": kept}, known)}


@state.quietly()
def read_optimizer(goal: Target, stored: Reader, found: Found, fill: list[Plan] | None = None) -> dict[str, Any]:
    """Read a state into new memory, each rank its shards, keyed by the optimizer's own names, in its own groups.

    Nothing else changes. `fill` is as `with_own_tensors` takes it. Not a collective. RuntimeError names parameters that differ;
    DamagedCheckpoint a bad file.
    """
    raw, names = matched(goal, stored, found)
    if fill is not None and stored.holds_files:
        raw["state"] = with_own_tensors(raw["state"], stored, goal.parameters, goal.states, fill)
    fitting = _Fitting(goal, stored.origin)
    states = {name: fitting.fitted(name, raw["state"][name]) for name in names}
    # An option may be a tensor, as a learning rate. What belongs to no parameter is unsharded.
    rest = {name: values for name, values in raw["state"].items() if name not in states}
    raw["param_groups"], rest = stored.read([raw["param_groups"], rest])
    stored.plan(fitting.pairs)()
    return {**raw, "state": states | rest}


def matched(goal: Target, stored: Reader, found: Found) -> tuple[dict[str, Any], list[str]]:
    """Return a stored state under an optimizer's own names, in its own groups, not read; and the names of its parameters in it.

    The rest of its states belongs to no parameter. Not a collective. RuntimeError names parameters that differ.
    """
    raw = optimizer_values(stored)
    if not is_named(raw):
        raw = named(raw, _order_of_numbers(goal, found, raw["param_groups"]))
    if goal.elsewhere:
        own_names = {other for name in goal.order for other in goal.also_called(name)}
        left = {name for name in goal.elsewhere if name not in own_names}
        mine = [
            {**group, "params": [name for name in group["params"] if name not in left]}
            for group in raw["param_groups"]
        ]
        raw = {
            **raw,
            "state": {key: value for key, value in raw["state"].items() if key not in left},
            "param_groups": mine,
        }
    states = dict(raw["state"])
    groups, sources = _own_groups(goal, raw["param_groups"], states, stored.origin)
    own = {name: states.pop(source, None) for name, source in sources.items()}
    own = {name: values for name, values in own.items() if values is not None}
    return {**raw, "state": {**own, **states}, "param_groups": groups}, list(own)


def _order_of_numbers(goal: Target, found: Found, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of numbered parameters: those the checkpoint has, else the optimizer's own, as torch takes them."""
    order = saved_names(found.folder, found.index, groups, goal.order)
    if order is not None:
        return order
    if goal.flat and len(goal.order) > 1:
        raise RuntimeError(
            f"{found.name} in {found.folder!r} has no names of parameters, and this optimizer's are flat, in an order of "
            "their own; nothing was loaded. Wrap the model with use_orig_params=True, or save it once more without FSDP."
        )
    counts = [len(group["params"]) for group in groups], [len(group) for group in goal.groups]
    if counts[0] != counts[1]:
        raise RuntimeError(
            f"{found.name} in {found.folder!r} has groups of {counts[0]} parameters, and this optimizer of {counts[1]}; "
            f"nothing was loaded. {_REMEDY}"
        )
    return goal.order


def _own_groups(
    goal: Target, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any], origin: str
) -> tuple[list[Any], dict[str, str]]:
    """Return the optimizer's own groups with the stored options, which are those of the parameters in it, and the names these were saved under."""
    home = {name: number for number, group in enumerate(groups) for name in group["params"]}
    made, sources = [], goal.sources(home)
    problems = [f"no state for {name}" for name, source in sources.items() if source not in home]
    for number, of_group in enumerate(goal.groups):
        saved_in = sorted({home[sources[name]] for name in of_group if sources[name] in home})
        if len({repr({**groups[source], "params": None, "param_names": None}) for source in saved_in}) > 1:
            problems.append(f"the parameters of group {number} in groups {saved_in}")
        source = groups[saved_in[0] if saved_in else min(number, len(groups) - 1)]
        # The names which torch keeps next to the numbers are the optimizer's own.
        options = {key: value for key, value in source.items() if key not in ("params", "param_names")}
        made.append({**options, "params": list(of_group)})
    strange = [name for name in home if name not in sources and states.get(name)]
    known = {other for name in goal.order for other in goal.also_called(name)} if strange else ()
    problems += [f"a state for {name}, which is not among them" for name in strange if name not in known]
    if problems:
        raise RuntimeError(
            f"For the optimizer's parameters {origin} has {', '.join(manifest.first_of(problems))}; nothing was loaded. {_REMEDY}"
        )
    return made, sources


@dataclass(frozen=True)
class _Fitting:
    """Memory for a stored state that has the shards of an optimizer's parameters.

    Attributes:
        pairs: stored tensors, and the memory that they are to be read into.
    """

    goal: Target
    origin: str
    pairs: list[tuple[StoredTensor, torch.Tensor]] = field(default_factory=list)

    def fitted(self, name: str, values: Any) -> Any:
        """Return the state of a parameter: what has its shape is sharded like it, the rest is unsharded."""
        before, memory = self.goal.states.get(name, {}), functools.partial(self._memory, name)
        if not isinstance(values, Mapping):
            return mapped_leaves(values, memory, StoredTensor)
        fitted: dict[Any, Any] = {}
        # In the optimizer's own order: that of shards depends on who wrote them.
        for key in dict.fromkeys((*before, *values)):
            if key not in values:
                continue
            value = values[key]
            # Ranks find the scales of their blocks in all of them.
            if isinstance(value, Mapping) and tensor_kinds.is_parts(value):
                fitted[key] = {
                    part: mapped_leaves(one, memory if part == "codes" else self._unsharded, StoredTensor)
                    for part, one in value.items()
                }
            elif isinstance(value, StoredTensor):
                fitted[key] = memory(value, key, before.get(key))
            else:
                fitted[key] = mapped_leaves(value, memory, StoredTensor)
        return fitted

    def _memory(self, name: str, value: StoredTensor, key: Any = "a value", before: Any = None) -> torch.Tensor:
        parameter = self.goal.parameters[name]
        if not value.shape or (not is_distributed_tensor(parameter) and _may_belong(value.shape, parameter.shape)):
            return self._unsharded(value)
        for tensor in (parameter, before):
            if isinstance(tensor, torch.Tensor) and tensor.size() == value.shape:
                return self._added(value, state.empty_on_host_like(tensor, value.dtype))
        raise RuntimeError(
            f"{key} of {name} has the shape {tuple(value.shape)} in {self.origin}, and the parameter {tuple(parameter.size())}; nothing was loaded. If such "
            "values differ from their parameters, let the optimizer step once before loading: that shows their shards."
        )

    def _unsharded(self, value: StoredTensor) -> torch.Tensor:
        return self._added(value, torch.empty(value.shape, dtype=value.dtype))

    def _added(self, value: StoredTensor, memory: torch.Tensor) -> torch.Tensor:
        self.pairs.append((value, memory))
        return memory


def _may_belong(stored: Sequence[int], own: Sequence[int]) -> bool:
    """Return whether a value may belong to a parameter: some optimizers keep one for each row or column, or only for all."""
    return len(stored) != len(own) or all(count in (1, whole) for count, whole in zip(stored, own, strict=True))


def read_for_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    folder: Path,
    index: int = 0,
    prefer: Layout | None = None,
    groups: list[list[str]] | None = None,
    fill: list[Plan] | None = None,
) -> dict[str, Any]:
    """Read an optimizer's state, whatever wrote it, into new memory, as its `load_state_dict` takes it.

    `groups` are as `target` takes them, `fill` as `with_own_tensors`. An error is raised only where it happens.

    Collective: call on every rank.
    """
    goal, io = target(optimizer, model, groups), io_of(model)
    fill = None if io.is_collective or not _keeps_tensors(optimizer) else fill

    def read() -> dict[str, Any]:
        found = required(folder, "optimizer", index, prefer)
        return read_optimizer(goal, found.open(), found, fill)

    return io.optimizer_to_load(optimizer, model, run_on_all_ranks(read) if io.is_collective else read())


def read_full_optimizer(
    optimizer: Any,
    models: Iterable[nn.Module],
    folder: Path,
    index: int = 0,
    map_location: Any = "cpu",
    load_kwargs: Mapping[str, Any] | None = None,
    fill: list[Plan] | None = None,
) -> dict[str, Any]:
    """Read a state of any layout with the numbers that the optimizer has, which is not changed.

    `fill` is as `with_own_tensors` takes it. FileNotFoundError without a state, RuntimeError for that of other parameters, DamagedCheckpoint for bad shards.

    Not a collective.
    """
    found = required(folder, "optimizer", index, "full")
    model, groups = model_io.owner(optimizer, models)
    fill = fill if str(map_location) == "cpu" and _keeps_tensors(optimizer) else None
    stored = found.open(load_kwargs)
    raw = stored.state
    if found.layout == "full" and not is_state(raw):
        return to_device(stored.read(raw), map_location)
    if found.layout == "full" and not is_named(raw) and _has_own_numbers(raw, groups, folder, index):
        if fill is not None:
            inner = inner_optimizer(optimizer)
            numbers = [number for group in raw["param_groups"] for number in group["params"]]
            own = [parameter for group in inner.param_groups for parameter in group["params"]]
            parameters = dict(zip(numbers, own, strict=False))
            states = {number: inner.state.get(parameter, {}) for number, parameter in parameters.items()}
            raw = {**raw, "state": with_own_tensors(raw["state"], stored, parameters, states, fill)}
        return to_device(stored.read(raw), map_location)
    if model is None:
        raise RuntimeError(
            f"{found.name} in {folder!r} names its parameters, and no prepared model has those of this optimizer. "
            "Prepare the model, too."
        )
    goal = target(optimizer, model, groups)
    return to_device(model_io.numbered(read_optimizer(goal, stored, found, fill)), map_location)


def _keeps_tensors(optimizer: Any) -> bool:
    """Return whether an optimizer keeps the tensors in a state that it loads, and does not look at their values: torch's own do."""
    inner = inner_optimizer(optimizer)
    is_torchs = type(inner).__setstate__.__module__.startswith("torch.optim.")
    return is_torchs and uses_torch_load(inner) and not tensor_kinds.kept_by(inner)


def with_own_tensors(
    states: Mapping[Any, Any],
    stored: Reader,
    parameters: Mapping[Any, Any],
    own_states: Mapping[Any, Mapping[str, Any]],
    fill: list[Plan],
) -> dict[Any, Any]:
    """Return stored states with an optimizer's own tensors in the place of the stored ones that may be read over them.

    Args:
        states: The states by the numbers or names of the parameters.
        stored: Reads them.
        parameters: The optimizer's parameters by the same.
        own_states: What the optimizer has for each parameter already.
        fill: Takes the plan that reads over the optimizer's tensors, for when it cannot be given its former state any more.
    """
    pairs: list[tuple[StoredTensor, torch.Tensor]] = []
    states = dict(states)
    for name, parameter in parameters.items():
        if not isinstance(states.get(name), Mapping):
            continue
        states[name] = values = dict(states[name])
        for key, own in own_states.get(name, {}).items():
            value = values.get(key)
            if (
                isinstance(value, StoredTensor)
                and isinstance(own, torch.Tensor)
                and key != "step"
                and own.shape == value.shape
                # Torch converts what differs from the parameter.
                and own.dtype == value.dtype == parameter.dtype
                and own.device == parameter.device
                and state.is_plain_on_host(own)
            ):
                pairs.append((value, own))
                values[key] = own
    if pairs:
        fill.append(stored.plan(pairs))
    return states


def _has_own_numbers(raw: Mapping[str, Any], own: list[list[str]], folder: Path, index: int) -> bool:
    """Return whether the numbers in a state are the optimizer's own, as far as names tell it; `own` has its names, if a model has them."""
    if not own:
        return True
    order = list(itertools.chain.from_iterable(own))
    saved = saved_names(folder, index, raw["param_groups"], order)
    counts = [len(group["params"]) for group in raw["param_groups"]]
    return saved is None or (saved == order and counts == list(map(len, own)))
