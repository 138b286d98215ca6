"""The states of FSDP1: of models that are a FullyShardedDataParallel, which gives and takes them by collectives."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint.model_io import ModelIO, ModelState, inner_optimizer, renamed, tied_again
from accelerate.checkpoint.state import Entries, Wanted, quietly
from accelerate.extensions.fsdp1.torch_private import buffer_dtypes, member_names, shared_members
from accelerate.modules.unwrap import canonical_names, is_compiled_module
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run
from accelerate.strategies.sharded_io import ShardedIO

# Parts that torch adds to names of parameters, besides those of torch.compile.
_STEPS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class FSDP1Models(ModelIO):
    """How a FullyShardedDataParallel, with or without the original parameters, gives and takes states."""

    is_collective = True
    gives_copies = True
    gathers_itself = True

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the model as it is, out of torch.compile. Not a collective."""
        while is_compiled_module(model):
            model = model._orig_mod  # type: ignore[assignment]  # a module, but torch has no type for it
        return model

    def tied_names(self, model: nn.Module) -> list[list[str]]:
        """Return the groups of names that mean one parameter, also within flat parameters. Not a collective."""
        tied = super().tied_names(model)
        for prefix, module in self.unwrapped(model).named_modules():
            # The parameter whose memory it is comes first.
            for info in shared_members(module):
                inside = [(info.prim_module_name, info.prim_param_name), (info.module_name, info.param_name)]
                tied.append(canonical_names(".".join(part for part in (prefix, *pair) if part) for pair in inside))
        return tied

    def held_names(self, model: nn.Module) -> dict[int, list[str]]:
        """Return the names of each parameter, those of its members if it is flat, by its id. Not a collective."""
        names = super().held_names(model)
        for name, parameter in self.unwrapped(model).named_parameters():
            if (members := member_names(parameter)) is not None:
                prefix = name.rpartition(".")[0]
                names[id(parameter)] = [f"{prefix}.{member}" if prefix else member for member in members]
        return names

    def state_dict(self, model: nn.Module, getter: Callable[..., Any] | None) -> dict[str, Any]:
        """Return the model's own state dict, each rank with its shards. Collective: call on every rank."""
        with _gives_shards(model):
            return model.state_dict() if getter is None else getter(model, sd_options=None)

    @quietly()
    def apply_model(
        self,
        model: nn.Module,
        state: Mapping[str, Any],
        own: ModelState,
        setter: Callable[..., Any] | None = None,
        strict: bool = True,
    ) -> Any:
        """Give a model a state; return missing and unexpected keys. Collective: call on every rank."""
        missing = []
        if not strict:  # FSDP1 takes all of its parameters, or none
            missing = [name for name in own.values if name not in state]
            state = {**{name: own.values[name] for name in missing}, **state}
        state = {own.own.get(name, name): value for name, value in state.items()}
        with _gives_shards(model):
            keys = model.load_state_dict(state) if setter is None else setter(model, state, sd_options=None)
        if missing:
            keys = torch_private.IncompatibleKeys([*keys.missing_keys, *missing], keys.unexpected_keys)
        return keys

    @quietly()
    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, groups: list[list[str]] | None = None
    ) -> dict[str, Any]:
        """Return an optimizer's state keyed by the names of parameters, each rank with its shards.

        Collective: call on every rank.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        inner = inner_optimizer(optimizer)
        if groups is None:
            self.own_names(optimizer, model)  # a ValueError for a parameter that the model does not have
        if torch_private.is_fake():  # torch asks other ranks for the names of parameters that this rank has no part of
            return inner.state_dict()
        with _gives_shards(model):
            raw = FullyShardedDataParallel.optim_state_dict(self.unwrapped(model), inner, group=_group(model))
        parameters = itertools.chain.from_iterable(group["params"] for group in raw["param_groups"])
        names = [key for key in (*raw["state"], *parameters) if isinstance(key, str)]
        return renamed(raw, dict(zip(names, canonical_names(names), strict=True)))

    def optimizer_tensors(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, groups: list[list[str]]
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]], bool]:
        """Return the model's state, no states of parameters, and whether parameters are flat.

        Collective: call on every rank.
        """
        parameters = [parameter for group in inner_optimizer(optimizer).param_groups for parameter in group["params"]]
        flat = any(member_names(parameter) is not None for parameter in parameters)
        return self.model_state(model).values, {}, flat

    @quietly()
    def optimizer_to_load(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a state, keyed by names, as the optimizer's `load_state_dict` takes it.

        Collective: call on every rank.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        # FSDP1's names keep the parts of torch.compile.
        written = list(itertools.chain.from_iterable(self.own_names(optimizer, model)))
        kept = [".".join(step for step in name.split(".") if step not in _STEPS) for name in written]
        raw = renamed(state, dict(zip(canonical_names(written), kept, strict=True)))
        with _gives_shards(model):
            inner, outer = inner_optimizer(optimizer), self.unwrapped(model)
            return FullyShardedDataParallel.optim_state_dict_to_load(outer, inner, raw, group=_group(model))


class FSDP1IO(ShardedIO):
    """The states of a run with FSDP1, whose units are gathered as in a forward."""

    def whole_tensors(self, accelerator: Run, model: nn.Module, is_selected: Wanted = bool) -> Entries:
        """Gather a unit at a time, like a forward, if it has selected entries.

        Collective: call on every rank.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        again, kinds = tied_again(model), buffer_dtypes(model)
        for prefix, unit in model.named_modules():
            if unit is not model and not isinstance(unit, FullyShardedDataParallel):
                continue
            inside = list(unit.named_modules(prefix=prefix))
            units = tuple([f"{name}." for name, part in inside[1:] if isinstance(part, FullyShardedDataParallel)])
            inside = [(name, module) for name, module in inside if not f"{name}.".startswith(units)]
            chosen = {key for key in _names(inside) if key not in again and is_selected(key)}
            if not chosen:
                continue
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for name, module in inside:
                    state = torch_private.own_state(module, name)
                    for key, value in zip(canonical_names(state), state.values(), strict=True):
                        if key in chosen:
                            yield key, value.to(kinds[key]) if key in kinds else value


@contextlib.contextmanager
def _gives_shards(model: nn.Module) -> Iterator[None]:
    """Let FullyShardedDataParallel give and take states of shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    # Not FULL_STATE_DICT on rank 0: torch frees the gathered memory before it was copied, where it is the host's.
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        yield


def _group(model: nn.Module) -> Any:
    """Return the process group that FSDP1 gathers optimizer states in, None for the default one."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    outer = next(module for module in model.modules() if isinstance(module, FullyShardedDataParallel))
    return None if outer.sharding_strategy in hybrid else outer.process_group


def _names(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the names of modules' entries in a state dict; for flat parameters the names of their members.

    Not a collective.
    """
    names: list[str] = []
    for prefix, module in modules:
        for key in torch_private.own_state(module, prefix):
            owner, dot, entry = key.rpartition(".")
            members = member_names(module._parameters.get(entry))
            names += [key] if members is None else [f"{owner}{dot}{member}" for member in members]
    return canonical_names(names)
