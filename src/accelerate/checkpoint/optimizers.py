"""Optimizers in a checkpoint: reading any stored state into the shards and groups of an optimizer of the same parameters.

The names of parameters connect the two, as the numbers in an optimizer's state do not.
"""

import functools
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint import load, manifest, model_io, state
from accelerate.checkpoint.layouts import Found, Path, find, read_like, required
from accelerate.checkpoint.load import CheckpointFolder, Deferred
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.model_io import io_of
from accelerate.checkpoint.state import Layout, is_distributed_tensor, mapped_leaves, run_on_all_ranks
from accelerate.modules import tensor_kinds
from accelerate.modules.unwrap import match_names

if TYPE_CHECKING:
    from accelerate.checkpoint.dcp import CheckpointReader

_REMEDY = "Make model and optimizer as they were when the checkpoint was saved."

# -- names of parameters -----------------------------------------------------------------------------------------------


def read_names(folder: Path, index: int = 0) -> list[list[str]] | None:
    """Return the names of an optimizer's parameters that a checkpoint has, for each group, or None. Any rank, alone."""
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
        over: `CheckpointReader.finish` reads, later, over the tensors that the optimizer has.
        elsewhere: names in the model that other stages of a pipeline have, whose optimizers read them.
    """

    groups: list[list[str]]
    parameters: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]
    find_ties: Callable[[], Sequence[Sequence[str]]]
    flat: bool = False
    over: bool = False
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
    """Return what an optimizer needs; `groups` are the names of its parameters, where they are known. All ranks."""
    io = io_of(model)
    groups = io.parameter_names(optimizer, model) if groups is None else groups
    parameters, states, flat = io.optimizer_tensors(optimizer, model, groups)
    return Target(
        groups, parameters, states, functools.partial(io.tied_names, model), flat, elsewhere=io.elsewhere(model)
    )


def is_state(raw: Any) -> bool:
    """Say whether a value has the form that torch's optimizers give their states."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("state", {}), Mapping):
        return False
    groups = raw.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def optimizer_values(stored: "CheckpointReader") -> dict[str, Any]:
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
    folder: str, index: int, groups: Sequence[Mapping[str, Any]], own: Sequence[str] | None = None
) -> list[str] | None:
    """Return the names of numbered parameters, if the checkpoint has them. Any rank, alone."""
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
    """Say whether an optimizer's state is keyed by names."""
    return all({str}.issuperset(map(type, group["params"])) for group in raw["param_groups"])


def named(raw: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state keyed by names instead of numbers."""
    groups = raw["param_groups"]
    known = dict(zip((number for group in groups for number in group["params"]), order, strict=True))
    kept = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    states = {key: value for key, value in raw["state"].items() if key in known or not isinstance(key, int)}
    return {**raw, **model_io.renamed({"state": states, "param_groups": kept}, known)}


@state.quietly()
def read_optimizer(goal: Target, stored: "CheckpointReader", found: Found) -> dict[str, Any]:
    """Read a state into new memory, each rank its shards, keyed by the optimizer's own names, in its own groups.

    Nothing else changes. Any rank, alone. RuntimeError names parameters that differ; DamagedCheckpoint a bad file.
    """
    raw, known = matched(goal, stored, found)
    result = {name: _fitted(goal, name, raw["state"][name], stored) for name in known}
    raw["param_groups"] = stored.allocate(raw["param_groups"])  # an option may be a tensor, as a learning rate
    # What belongs to no parameter is whole.
    result |= {name: stored.allocate(values) for name, values in raw["state"].items() if name not in result}
    stored.fill()
    return {**raw, "state": result}


def matched(goal: Target, stored: "CheckpointReader", found: Found) -> tuple[dict[str, Any], list[str]]:
    """Return a stored state under an optimizer's own names, in its own groups, not read; and the names of its parameters in it.

    The rest of its states belongs to no parameter. Any rank, alone. RuntimeError names parameters that differ.
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
        # The names which torch keeps beside the numbers are the optimizer's own.
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


def _fitted(goal: Target, name: str, values: Any, stored: "CheckpointReader") -> Any:
    """Return the state of a parameter: what has its shape is sharded like it, the rest is whole."""
    own, present = goal.parameters[name], goal.states.get(name, {})

    def fit(value: Any, key: Any = "a value") -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.dim():
            # FSDP1 writes one step count for all parameters of a unit; shared, it would be counted up once for each of them.
            return stored.into(value, torch.empty_like(value, device="cpu")) if value.is_meta else load.own_copy(value)
        if not is_distributed_tensor(own) and not is_distributed_tensor(value):
            made = stored.allocate(value) if _may_belong(value.shape, own.shape) else None
        else:
            made = read_like(own, value, stored)
            before = present.get(key)
            if made is None and isinstance(before, torch.Tensor):
                made = read_like(before, value, stored)
        if made is None:
            raise RuntimeError(
                f"{key} of {name} has the shape {tuple(value.size())} in {stored.origin}, and the parameter {tuple(own.size())}; nothing was loaded. If such "
                "values differ from their parameters, let the optimizer step once before loading: that shows their shards."
            )
        return made

    if not isinstance(values, Mapping):
        return mapped_leaves(values, fit)
    fitted: dict[Any, Any] = {}
    later: list[tuple[torch.Tensor, torch.Tensor]] = []
    # In the optimizer's own order: that of shards depends on who wrote them.
    for key in dict.fromkeys((*present, *values)):
        if key not in values:
            continue
        value, before = values[key], present.get(key)
        if tensor_kinds.is_parts(value):  # ranks find the scales of their blocks in all of them
            fitted[key] = {name: fit(one) if name == "codes" else stored.allocate(one) for name, one in value.items()}
        elif isinstance(value, (Mapping, list)):
            fitted[key] = mapped_leaves(value, fit)
        # An optimizer converts what differs from the parameter; anything else can be read over what it has.
        elif (
            goal.over
            and isinstance(value, torch.Tensor)
            and isinstance(before, torch.Tensor)
            and value.dim()
            and before.size() == value.size()
            and before.device == own.device
            and before.dtype == value.dtype == own.dtype
            and state.address_of(before) is not None
        ):
            fitted[key] = before
            later.append((value, before))
        else:
            fitted[key] = fit(value, key)
    stored.over(later)
    return fitted


def _may_belong(stored: Sequence[int], own: Sequence[int]) -> bool:
    """Say whether a value may belong to a parameter: some optimizers keep one for each row or column, or only for all."""
    return len(stored) != len(own) or all(count in (1, whole) for count, whole in zip(stored, own, strict=True))


def read_for_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    folder: Path,
    index: int = 0,
    prefer: Layout | None = None,
    over: bool = False,
    groups: list[list[str]] | None = None,
) -> Deferred:
    """Read an optimizer's state, whatever wrote it, as its `load_state_dict` takes it. All ranks; what fails is raised where it fails.

    With `over`, for a verified checkpoint and an optimizer that cannot refuse it, it is read over what there is. `groups` are as `target`
    takes them.
    """
    goal, io = target(optimizer, model, groups), io_of(model)
    goal = replace(goal, over=over and isinstance(folder, CheckpointFolder) and not io.is_collective)

    def read() -> tuple[dict[str, Any], "CheckpointReader"]:
        found = required(folder, "optimizer", index, prefer)
        stored = found.open()
        return read_optimizer(goal, stored, found), stored

    values, stored = run_on_all_ranks(read) if io.is_collective else read()
    return Deferred(io.optimizer_to_load(optimizer, model, values), stored.finish)


def read_full_optimizer(
    optimizer: Any, models: Iterable[nn.Module], folder: Path, index: int = 0, **options: Any
) -> Mapping[str, Any]:
    """Read a state of any layout with the numbers that the optimizer has, which stays as it is. Any rank, alone.

    FileNotFoundError without a state, RuntimeError for that of other parameters, DamagedCheckpoint for bad shards.
    """
    found = Found(os.fspath(folder), manifest.optimizer_file(index), "full", index, "optimizer")
    if not os.path.exists(os.path.join(folder, found.name)):
        found = find(folder, "optimizer", index) or found  # such as a Trainer's
    model, groups = model_io.owner(optimizer, models)
    goal = None if model is None else target(optimizer, model, groups)
    if found.layout == "full":
        raw: Mapping[str, Any] = load.read_file(folder, found.name, f"optimizer {index}", mapped=True, **options)
        if not is_state(raw) or (not is_named(raw) and _has_own_numbers(raw, goal, folder, index)):
            return raw
    if goal is None:
        raise RuntimeError(
            f"{found.name} in {found.folder!r} names its parameters, and no prepared model has those of this optimizer. "
            "Prepare the model, too."
        )
    return model_io.numbered(read_optimizer(goal, found.open(**options), found))


def _has_own_numbers(raw: Mapping[str, Any], goal: Target | None, folder: Path, index: int) -> bool:
    """Say whether the numbers in a state are the optimizer's own, as far as names tell it."""
    if goal is None:
        return True
    order = saved_names(os.fspath(folder), index, raw["param_groups"], goal.order)
    counts = [len(group["params"]) for group in raw["param_groups"]]
    return order is None or (order == goal.order and counts == list(map(len, goal.groups)))
