"""The states of models and optimizers that are spread over ranks: taken, gathered, and given back.

A model may be wrapped by DistributedDataParallel or FullyShardedDataParallel (with or without the original parameters), be
sharded by `fully_shard`, be split by tensor parallelism, or be plain. Its state has the names of the parameters as the user
wrote them, and that of its optimizer is keyed by them, so that they fit any other of these, on any number of ranks.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate.modules.named import canonical_name
from accelerate.modules.unwrap import extract_model_from_parallel

Layout = Literal["full", "sharded", "local"]
T = TypeVar("T")

# -- ranks -------------------------------------------------------------------------------------------------------------


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """Return this rank and the number of ranks; 0 and 1 without a process group.

    Args:
        group: the ranks that count; all by default.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def together(work: Callable[[], T], group: Any = None) -> T:
    """Do something on every rank; if it fails on one of them, raise on all. All ranks.

    Args:
        work: contains no collectives, so that a rank which fails keeps none waiting.
        group: the ranks that do it; all by default.

    Raises:
        RuntimeError: it failed on another rank. Where it failed, its own error is raised.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    problems = on_all(None if error is None else f"{type(error).__name__}: {error}", group)
    failed = {number: text for number, text in enumerate(problems) if text is not None}
    if failed and error is None:
        number, text = next(iter(failed.items()))
        raise RuntimeError(f"Rank {number} failed, so rank {rank_and_size(group)[0]} stops, too. {text}")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def on_all(value: Any, group: Any = None) -> list[Any]:
    """Return what each rank gives, in the order of ranks. All ranks.

    Args:
        value: small, and plain data.
        group: the ranks that do it; all by default.
    """
    import torch.distributed as dist

    size = rank_and_size(group)[1]
    gathered_values: list[Any] = [value] * size
    if size > 1:
        dist.all_gather_object(gathered_values, value, group)
    return gathered_values


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warnings about deprecated parts of torch that torch itself uses."""
    with warnings.catch_warnings():
        for message in (
            "Please use DTensor instead",
            ".*_get_pg_default_device",
            "Multiple backends are registered",
            "When using ``NO_SHARD``",
        ):
            warnings.filterwarnings("ignore", message)
        warnings.filterwarnings("ignore", "FSDP.(optim_)?state_dict", FutureWarning)
        yield


def mapped_leaves(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return a state whose values, in nested dictionaries and lists, have been changed.

    Args:
        state: it is not changed itself.
        change: called with each value that is neither.
    """
    if isinstance(state, Mapping):
        return {name: mapped_leaves(value, change) for name, value in state.items()}
    if isinstance(state, list):
        return [mapped_leaves(value, change) for value in state]
    return change(state)


# -- kinds of models and tensors ---------------------------------------------------------------------------------------


def _dtensor() -> type:
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import DTensor
    return DTensor


def is_sharded_tensor(value: Any) -> bool:
    """Say whether a value is a ShardedTensor, the kind that FSDP1 has.

    Args:
        value: anything.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return isinstance(value, ShardedTensor)


def is_spread(value: Any) -> bool:
    """Say whether a tensor knows the whole while this rank has a part.

    Args:
        value: anything.
    """
    return torch.distributed.is_available() and (isinstance(value, _dtensor()) or is_sharded_tensor(value))


def is_fsdp1(model: nn.Module) -> bool:
    """Say whether a model is, or contains, a FullyShardedDataParallel.

    Args:
        model: any module.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return a model out of what only changes its names: DistributedDataParallel and compilation around the whole."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model if is_fsdp1(model) else extract_model_from_parallel(model, keep_torch_compile=False)


@contextlib.contextmanager
def _fsdp1(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Let FullyShardedDataParallel give and take states of one layout; for other models nothing happens."""
    if not is_fsdp1(model):
        yield
        return
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        LocalStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    # Not FULL_STATE_DICT on rank 0: torch frees the gathered memory before it was copied, where it is the host's.
    local = layout == "local"
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.LOCAL_STATE_DICT if local else StateDictType.SHARDED_STATE_DICT,
        LocalStateDictConfig() if local else ShardedStateDictConfig(),
        None if local else ShardedOptimStateDictConfig(),
    ):
        yield


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that mean one parameter, as the user wrote them.

    Args:
        model: of any kind.
    """
    model = _unwrapped(model)
    groups: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(canonical_name(name))
    flat = []
    for prefix, module in model.named_modules():
        shared = getattr(getattr(module, "_flat_param", None), "_shared_param_infos", ())
        for info in shared:  # name, module's name and module; then the same of the parameter it shares
            inside = [(info.module_name, info.param_name), (info.prim_module_name, info.prim_param_name)]
            flat.append([canonical_name(".".join(part for part in (prefix, *pair) if part)) for pair in inside])
    return [names for names in groups.values() if len(names) > 1] + flat


# -- taking states -----------------------------------------------------------------------------------------------------


def _default_getter(model: nn.Module, sd_options: Any = None) -> dict[str, Any]:
    if sd_options is None:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model, options=sd_options)


@dataclass(frozen=True)
class ModelState:
    """A model's state, and what its names are in the model.

    Attributes:
        values: tensors, by the names of the user: DTensors and ShardedTensors where ranks have parts. They are no copies.
        own: for each name the one in the model's own state dict.
    """

    values: dict[str, Any]
    own: dict[str, str]


@quietly()
def model_state(
    model: nn.Module, getter: Callable[..., dict[str, Any]] = _default_getter, layout: Layout = "sharded"
) -> ModelState:
    """Return a model's state by the names the user wrote, each rank with its shards. It is no copy. All ranks.

    Args:
        model: of any kind.
        getter: takes the model and ``sd_options``, torch's options or None, and returns the state dict.
        layout: ``"local"`` for FSDP1's flat parameters.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    with _fsdp1(model, layout):
        state = getter(model, sd_options=None if is_fsdp1(model) else StateDictOptions())
    own = {canonical_name(name): name for name in state}
    return ModelState({name: state[raw] for name, raw in own.items()}, own)


def parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the names of an optimizer's parameters, for each of its groups, as the user wrote them. Any rank, alone.

    Args:
        optimizer: wrapped or not.
        model: the model that it updates, of any kind.

    Raises:
        ValueError: the optimizer has a parameter that the model does not have.
    """
    return [[canonical_name(name) for name in group] for group in _names_in_modules(optimizer, model)]


def names_among(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> list[list[str]] | None:
    """Return the names of an optimizer's parameters, or None if no single model has all of them. Any rank, alone.

    Args:
        optimizer: wrapped or not.
        models: the models of the run; one of them has the parameters.
    """
    for model in models:
        with contextlib.suppress(ValueError):
            return parameter_names(optimizer, model)
    return None


def _names_in_modules(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in _unwrapped(model).named_parameters():
        inside = getattr(parameter, "_fqns", None)  # of FSDP1's flat parameter: the names below its module
        prefix = name.rpartition(".")[0]
        names[id(parameter)] = [name] if inside is None else [f"{prefix}.{n}" if prefix else n for n in inside]
    found: list[list[str]] = []
    for number, group in enumerate(inner_optimizer(optimizer).param_groups):
        found.append([])
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"Parameter {position} of the optimizer's group {number} (shape {tuple(parameter.shape)}) is not among "
                    f"those of {type(model).__name__}, so its state has no name. Pass the model that this optimizer trains."
                )
            found[-1] += names[id(parameter)]
    return found


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer out of what wraps it.

    Args:
        optimizer: wrapped or not.
    """
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


@quietly()
def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state keyed by the names of parameters, each rank with its shards. It is no copy. All ranks.

    Unlike torch's `get_optimizer_state_dict` it does not step an optimizer that has not stepped yet: that would count.

    Args:
        optimizer: wrapped or not.
        model: the model that it updates.

    Raises:
        ValueError: the optimizer has a parameter that the model does not have.
    """
    inner = inner_optimizer(optimizer)
    groups = parameter_names(optimizer, model)
    if is_fsdp1(model):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with _fsdp1(model, "sharded"):
            raw = FullyShardedDataParallel.optim_state_dict(_unwrapped(model), inner, group=_group(model))
        return {
            "state": {canonical_name(name): value for name, value in raw["state"].items()},
            "param_groups": [
                {**group, "params": [canonical_name(name) for name in group["params"]]}
                for group in raw["param_groups"]
            ],
        }
    raw = inner.state_dict()
    order = dict(zip(_flat(raw["param_groups"]), itertools.chain(*groups), strict=True))
    return {
        # Some optimizers keep what belongs to no parameter beside the parameters' states.
        "state": {order.get(number, number): value for number, value in raw["state"].items()},
        "param_groups": [{**group, "params": [order[n] for n in group["params"]]} for group in raw["param_groups"]],
    }


def _group(model: nn.Module) -> Any:
    """Return the process group that FSDP1 gathers optimizer states in, None for the default one."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    outer = next(module for module in model.modules() if isinstance(module, FullyShardedDataParallel))
    return None if outer.sharding_strategy in hybrid else outer.process_group


@quietly()
def gathered(state: Any) -> Any:
    """Return a state with whole tensors in the memory of rank 0's host, one gathered after the other. All ranks.

    Args:
        state: nested dictionaries and lists. Ranks other than 0 get None for what is in them.
    """
    main = rank_and_size()[0] == 0

    def gather(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value if main else None
        whole = value.detach()
        if is_spread(value):
            whole = _gather_shards(value) if is_sharded_tensor(value) else _whole(value)
        return _plain(whole).cpu() if main and whole is not None else None

    return mapped_leaves(state, gather)


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return what a wrapper around one tensor holds: torchao's weights that are gathered in 8 bits are such."""
    parts = value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else []
    return getattr(value, parts[0]) if parts == ["_tensor"] else value


def _whole(value: Any) -> torch.Tensor:
    value = value.detach()
    if value.device.type != value.device_mesh.device_type:  # offloaded; its mesh communicates on the device
        value = value.to(value.device_mesh.device_type)
    return value.full_tensor()


def _gather_shards(value: Any) -> torch.Tensor | None:
    """Return the whole of a ShardedTensor of FSDP1 on the first rank of its group: its ranks have slices of dim 0, in order."""
    import torch.distributed as dist

    group = value._process_group or dist.group.WORLD
    world, first = dist.get_world_size(group), dist.get_rank(group) == 0
    size = value.size()
    rows = -(-size[0] // world) if size else 1
    shards = [shard.tensor for shard in value.local_shards()]
    backend = dist.get_backend(group)
    device = shards[0].device if shards else torch.device("cpu")
    if "nccl" in backend and device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    mine = torch.zeros((rows, *size[1:]), dtype=value.dtype, device=device)
    if shards:
        mine[: shards[0].shape[0]].copy_(shards[0])
    pieces = [torch.empty_like(mine) for _ in range(world)] if first else None
    dist.gather(mine, pieces, dst=dist.get_global_rank(group, 0), group=group)
    return torch.cat(pieces)[: size[0]] if pieces is not None else None


# -- giving states back ------------------------------------------------------------------------------------------------


@quietly()
def like(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return new memory of the host for what this rank has of a tensor, with the same knowledge of the whole.

    Args:
        value: a tensor, DTensor or ShardedTensor.
        dtype: of the new one, if it is another.
    """
    dtype = dtype or value.dtype
    if not is_sharded_tensor(value):
        return torch.empty_like(value.detach(), dtype=dtype, device="cpu")
    made = torch.empty_like(value, dtype=dtype)
    return made if all(shard.tensor.device.type == "cpu" for shard in made.local_shards()) else made.cpu()


def part(value: Any) -> torch.Tensor:
    """Return what this rank has of a tensor; empty, if nothing. It is no copy.

    Args:
        value: a tensor, DTensor or ShardedTensor.
    """
    if isinstance(value, _dtensor()):
        return value.detach().to_local()
    if is_spread(value):
        shards = value.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty(0, dtype=value.dtype)
    return value.detach()


@quietly()
def plain_part(value: Any) -> Any:
    """Return a value as plain data: of a ShardedTensor, which is none, what this rank has of it.

    Args:
        value: anything.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return part(value).cpu() if is_sharded_tensor(value) else value.detach()


@quietly()
def filled_like(value: Any, stored: torch.Tensor) -> torch.Tensor | None:
    """Return `like` with what a rank wrote of its own; None if that is sharded in another way. Any rank, alone.

    Args:
        value: a tensor, DTensor or ShardedTensor.
        stored: what the file of this rank has for it.
    """
    made, theirs = like(value, stored.dtype), part(stored)
    if isinstance(stored, _dtensor()) and isinstance(value, _dtensor()):
        if (stored.size(), stored.placements) != (value.size(), value.placements):
            return None
    if part(made).shape != theirs.shape:
        return None
    part(made).copy_(theirs)
    return made


def _default_setter(model: nn.Module, state: dict[str, Any], sd_options: Any = None) -> Any:
    if sd_options is None:
        return model.load_state_dict(state)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    return set_model_state_dict(model, state, options=sd_options)


@quietly()
def apply_model(
    model: nn.Module,
    state: Mapping[str, Any],
    own: ModelState,
    setter: Callable[..., Any] = _default_setter,
    layout: Layout = "sharded",
    strict: bool = True,
) -> Any:
    """Give a model its state. All ranks.

    Args:
        model: of any kind.
        state: by the names of the user, with shards as the model has them.
        own: the model's own state, as `model_state` returns it.
        setter: takes the model, the state and ``sd_options``, torch's options or None, and loads it.
        layout: of the state.
        strict: all names must be there.

    Returns:
        What the setter returns: missing and unexpected keys.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    if layout == "local":  # loading a state dict refuses flat parameters; those of the state dict are no copies
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                part(own.values[name]).copy_(part(value))
        return nn.modules.module._IncompatibleKeys([], [])
    missing: list[str] = []
    if not strict and is_fsdp1(model):  # which takes all of its parameters, or none
        missing = [name for name in own.values if name not in state]
        state = {**{name: own.values[name] for name in missing}, **state}
    state = {own.own.get(name, name): value for name, value in state.items()}
    with _fsdp1(model, layout):
        keys = setter(model, state, sd_options=None if is_fsdp1(model) else StateDictOptions(strict=strict))
    return (
        nn.modules.module._IncompatibleKeys([*keys.missing_keys, *missing], keys.unexpected_keys) if missing else keys
    )


@quietly()
def optimizer_to_load(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as its `load_state_dict` takes it. All ranks.

    Args:
        optimizer: wrapped or not.
        model: the model that it updates.
        state: keyed by names, with shards as the model has them, and with the optimizer's own groups of names.
    """
    if not is_fsdp1(model):
        return numbered(state)
    from torch.distributed.fsdp import FullyShardedDataParallel

    # FSDP1's names keep what torch.compile put into them.
    own = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    names = {
        canonical_name(name): ".".join(step for step in name.split(".") if step not in own)
        for name in itertools.chain.from_iterable(_names_in_modules(optimizer, model))
    }
    raw = {
        "state": {names.get(name, name): value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }
    with _fsdp1(model, "sharded"):
        inner = inner_optimizer(optimizer)
        return FullyShardedDataParallel.optim_state_dict_to_load(_unwrapped(model), inner, raw, group=_group(model))


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state keyed by numbers, as torch's optimizers take it; what belongs to no parameter comes last.

    Args:
        state: keyed by names, with the optimizer's own groups of names.
    """
    order = {name: number for number, name in enumerate(_flat(state["param_groups"]))}
    states = sorted(state["state"].items(), key=lambda item: order.get(item[0], len(order)))
    groups = [{**group, "params": [order[name] for name in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {order.get(name, name): value for name, value in states}, "param_groups": groups}


def _flat(groups: Any) -> Iterator[str]:
    return itertools.chain.from_iterable(group["params"] for group in groups)
