"""How a model and its optimizer give and take their states, by the names of parameters as the user wrote them.

A state fits any other strategy on any number of ranks, because names and not numbers connect it to parameters. What differs
between kinds of models is a `ModelIO`: the base class serves plain models, DistributedDataParallel, `fully_shard` and tensor
parallelism; other kinds name theirs in `config.strategies`.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.checkpoint.state import Entries, mapped_leaves, quietly, rank_and_size
from accelerate.config.strategies import specs
from accelerate.extension import imported
from accelerate.modules import tensor_kinds
from accelerate.modules.unwrap import canonical_names, extract_model_from_parallel


@dataclass(frozen=True)
class ModelState:
    """A model's state, no copy, by the names of the user, and for each the name in the model's own state dict."""

    values: dict[str, Any]
    own: dict[str, str]


class ModelIO:
    """How models of one kind give and take their states, and name their parameters."""

    # Whether giving and taking is a collective, so that a rank that cannot read must tell the others before.
    is_collective: ClassVar[bool] = False
    # Whether a state is no memory of the model's parameters.
    gives_copies: ClassVar[bool] = False
    # Whether torch's functions for gathered states, and loading a part of a state, fail with these models.
    gathers_itself: ClassVar[bool] = False

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """Return a model out of its wrappers, but for those that give and take its state. Not a collective."""
        return extract_model_from_parallel(model, keep_torch_compile=False)

    def tied_names(self, model: nn.Module) -> list[list[str]]:
        """Return the groups of names that mean one parameter. Not a collective."""
        groups: dict[Any, list[str]] = {}
        for name, parameter in self.unwrapped(model).named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return [canonical_names(names) for names in groups.values() if len(names) > 1]

    def elsewhere(self, model: nn.Module) -> Collection[str]:
        """Return the names that are in the model, but in no state of this rank. Not a collective."""
        return ()

    def held_names(self, model: nn.Module) -> dict[int, list[str]]:
        """Return the names of what each parameter of `unwrapped` holds, by its id. Not a collective."""
        return {id(parameter): [name] for name, parameter in self.unwrapped(model).named_parameters()}

    def own_names(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
        """Return the names in `unwrapped` of an optimizer's parameters, for each group; ValueError for one of no model.

        Not a collective.
        """
        names = self.held_names(model)
        groups: list[list[str]] = []
        for number, group in enumerate(inner_optimizer(optimizer).param_groups):
            groups.append([])
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ValueError(
                        f"Parameter {position} of the optimizer's group {number} (shape {tuple(parameter.shape)}) is not among "
                        f"those of {type(model).__name__}, so its state has no name. Pass the model that this optimizer trains."
                    )
                groups[-1] += names[id(parameter)]
        return groups

    def parameter_names(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
        """Return the user's names of an optimizer's parameters, for each group; ValueError for one of no model.

        Not a collective.
        """
        return list(map(canonical_names, self.own_names(optimizer, model)))

    @quietly()
    def model_state(self, model: nn.Module, getter: Callable[..., Any] | None = None) -> ModelState:
        """Return a model's state by the names the user wrote, each rank with its shards. It is no copy.

        A `getter` takes the model and ``sd_options``, torch's options or None. Collective: call on every rank.
        """
        state = self.state_dict(model, getter)
        names = canonical_names(state)
        return ModelState(dict(zip(names, state.values(), strict=True)), dict(zip(names, state, strict=True)))

    def state_dict(self, model: nn.Module, getter: Callable[..., Any] | None) -> dict[str, Any]:
        """Return the model's own state dict, each rank with its shards.

        Collective: call on every rank.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions()
        return get_model_state_dict(model, options=options) if getter is None else getter(model, sd_options=options)

    @quietly()
    def apply_model(
        self,
        model: nn.Module,
        state: Mapping[str, Any],
        own: ModelState,
        setter: Callable[..., Any] | None = None,
        strict: bool = True,
    ) -> Any:
        """Give a model a state, sharded as its own, by the user's names; return missing and unexpected keys.

        A `setter` takes the model, the state and ``sd_options``, torch's options or None, loads it and returns the keys.
        Collective: call on every rank.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(strict=strict)
        state = {own.own.get(name, name): value for name, value in state.items()}
        if setter is not None:
            return setter(model, state, sd_options=options)
        return set_model_state_dict(model, state, options=options)

    @quietly()
    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, groups: list[list[str]] | None = None
    ) -> dict[str, Any]:
        """Return an optimizer's state keyed by the names of parameters, each rank with its shards; no copy.

        Unlike torch's `get_optimizer_state_dict` it does not step an optimizer that has not stepped yet: that would count.
        `groups` are `parameter_names`, where they are known; ValueError for a parameter that the model does not have.
        Collective: call on every rank.
        """
        names = self.parameter_names(optimizer, model) if groups is None else groups
        raw = plain_state(inner_optimizer(optimizer))
        numbers = itertools.chain.from_iterable(group["params"] for group in raw["param_groups"])
        return renamed(raw, dict(zip(numbers, itertools.chain(*names), strict=True)))

    def optimizer_tensors(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, groups: list[list[str]]
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]], bool]:
        """Return tensors of the optimizer's parameters and their states by the names in `groups`, and whether parameters are flat.

        They are no copies. Collective: call on every rank.
        """
        inner = inner_optimizer(optimizer)
        own = [parameter for group in inner.param_groups for parameter in group["params"]]
        named = dict(zip(itertools.chain.from_iterable(groups), own, strict=True))
        states = {name: inner.state[parameter] for name, parameter in named.items() if parameter in inner.state}
        return named, states, False

    def optimizer_to_load(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a state, keyed by names, sharded as the model, as the optimizer's `load_state_dict` takes it.

        Collective: call on every rank.
        """
        return numbered(state)


_PLAIN = ModelIO()


def io_of(model: nn.Module) -> ModelIO:
    """Return what gives and takes the states of a model. Not a collective."""
    for spec in specs():
        if spec.has_model is not None and spec.has_model(model):
            return _made(spec.model_io)
    return _PLAIN


@functools.cache
def _made(address: str) -> ModelIO:
    model_io: ModelIO = imported(address)()
    return model_io


def tied_again(model: nn.Module) -> set[str]:
    """Return the names of a model's state whose tensor comes under an earlier name. Not a collective."""
    return {name for names in io_of(model).tied_names(model) for name in names[1:]}


def collected(entries: Entries, model: nn.Module, everywhere: bool = False) -> dict[str, Any]:
    """Return copies of a model's whole entries, under all their names.

    They are in host memory on rank 0, and nowhere else; with `everywhere` on each rank's device.

    Collective: call on every rank.
    """
    state: dict[str, Any] = {}
    for name, value in entries:
        if isinstance(value, torch.Tensor):
            value = value.to(value.device if everywhere else "cpu", copy=True)
        if everywhere or rank_and_size()[0] == 0:
            state[name] = value
    for first, *others in io_of(model).tied_names(model):
        state |= {name: state[first] for name in others if first in state}
    return state


# -- optimizers ---------------------------------------------------------------------------------------------------------


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's optimizer out of what wraps it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of torch's optimizer, no copy, with values of few bits as a checkpoint holds them.

    Not a collective.
    """
    raw = optimizer.state_dict()
    for kind in tensor_kinds.kept_by(optimizer):
        raw = {**raw, "state": mapped_leaves(raw["state"], kind.plain)}
    return raw


def owner(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> tuple[nn.Module | None, list[list[str]]]:
    """Return the model that an optimizer updates, or None, and the names of its parameters, for each group."""
    for model in models:
        with contextlib.suppress(ValueError):
            return model, io_of(model).parameter_names(optimizer, model)
    return None, []


def names_file(optimizers: Iterable[torch.optim.Optimizer], models: Collection[nn.Module]) -> bytes | None:
    """Return the content of the file that says which parameters the optimizers' numbers mean; None without any."""
    known: dict[int, list[list[str]]] = {}
    for index, optimizer in enumerate(optimizers):
        if groups := owner(optimizer, models)[1]:
            known[index] = groups
    return names_text(known) if known else None


def names_text(known: Mapping[int, Sequence[Sequence[str]]]) -> bytes:
    """Return the content of that file; `known` has `parameter_names` by the index of the optimizer."""
    return (json.dumps(known, indent=1) + "\n").encode()


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state keyed by names as torch takes it: by numbers, and what belongs to no parameter last."""
    order = {
        name: number
        for number, name in enumerate(
            itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
        )
    }
    states = {name: state["state"][name] for name in order if name in state["state"]} | state["state"]
    return {**state, **renamed({**state, "state": states}, order)}


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state keyed in another way: by names, or by numbers.

    Some optimizers keep values that belong to no parameter next to the parameters' states. Their keys stay.
    """
    groups = [{**group, "params": [names.get(key, key) for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {names.get(key, key): value for key, value in state["state"].items()}, "param_groups": groups}
