"""The states of models and optimizers that are spread over ranks: taken, gathered, and given back.

A model may be wrapped by DistributedDataParallel or FullyShardedDataParallel (with or without the original parameters), be
sharded by `fully_shard`, be split by tensor parallelism, or be plain. Its state has the names of the parameters as the user
wrote them, and that of its optimizer is keyed by them, so that they fit any other of these, on any number of ranks.
"""

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from accelerate import comm
from accelerate.base.constants import SCALER_NAME
from accelerate.checkpoint import low_bit, manifest
from accelerate.config.enums import DistributedType
from accelerate.data.adapter import is_stateful
from accelerate.data.loader import PreparedLoader
from accelerate.modules.unwrap import canonical_names, extract_model_from_parallel, is_compiled_module
from accelerate.runtime import simulated, torch_private
from accelerate.runtime.run import Run

Layout = Literal["full", "sharded", "zero"]
Kind = Literal["model", "optimizer"]
# Of a state: name and value of each entry, one after the other; and what says of a name whether it is wanted.
Entries = Iterator[tuple[str, Any]]
Wanted = Callable[[str], Any]
T = TypeVar("T")

# -- ranks -------------------------------------------------------------------------------------------------------------


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Do something without collectives on every rank; raise its error where it fails, RuntimeError elsewhere."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    failed = torch.tensor(error is not None)
    if rank_and_size()[1] > 1:  # what went wrong travels only if something did
        failed = comm.for_type(DistributedType.MULTI_CPU).all_reduce(failed, "max")
    problems = gather_from_all_ranks(None if error is None else f"{type(error).__name__}: {error}") if failed else []
    if error is not None:
        raise error
    for number, text in enumerate(problems):
        if text is not None:
            raise RuntimeError(f"Rank {number} failed, so rank {rank_and_size()[0]} stops, too. {text}")
    return result  # type: ignore[return-value]


def gather_from_all_ranks(value: Any) -> list[Any]:
    """Return what each rank gives, small and plain data, in the order of ranks. All ranks."""
    size = rank_and_size()[1]
    given = [value] * size
    if size > 1:
        dist.all_gather_object(given, value)
    return given


def from_first_rank(value: Any) -> Any:
    """Return what rank 0 gives, small and plain data. All ranks."""
    given = [value]
    if rank_and_size()[1] > 1:
        dist.broadcast_object_list(given, 0)
    return given[0]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warnings about deprecated parts of torch that torch itself uses."""
    with warnings.catch_warnings():
        for message in (
            "Please use DTensor instead",
            ".*_get_pg_default_device",
            "Multiple backends are registered",
            "When using ``NO_SHARD``",
            "Gathering a tensor with zero elements",
        ):
            warnings.filterwarnings("ignore", message)
        warnings.filterwarnings("ignore", "FSDP.(optim_)?state_dict", FutureWarning)
        yield


def mapped_leaves(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return a new state whose values, in nested dictionaries and lists, have been changed."""
    if isinstance(state, Mapping):
        return {name: mapped_leaves(value, change) for name, value in state.items()}
    if isinstance(state, list):
        return [mapped_leaves(value, change) for value in state]
    return change(state)


# -- kinds of models and tensors ---------------------------------------------------------------------------------------


def is_dtensor(value: Any) -> bool:
    """Say whether a value is a DTensor. Asked of its abilities: importing the class takes time, and it has moved."""
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")


def is_sharded_tensor(value: Any) -> bool:
    """Say whether a value is a ShardedTensor, the kind that FSDP1 has."""
    return isinstance(value, torch.Tensor) and hasattr(value, "local_shards")


def is_distributed_tensor(value: Any) -> bool:
    """Say whether a value is a tensor that knows the whole while this rank has a part."""
    return is_dtensor(value) or is_sharded_tensor(value)


def is_fsdp1(model: nn.Module) -> bool:
    """Say whether a model is, or contains, a FullyShardedDataParallel."""
    # While the module is not imported there is no such model, and importing it is slow.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(
        [part for part in model.modules() if isinstance(part, fsdp.FullyShardedDataParallel)]
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return a model out of its wrappers, but for those of FSDP1, which give and take its states."""
    if not is_fsdp1(model):
        return extract_model_from_parallel(model, keep_torch_compile=False)
    while is_compiled_module(model):
        model = model._orig_mod
    return model


@contextlib.contextmanager
def _fsdp1(model: nn.Module) -> Iterator[None]:
    """Let FullyShardedDataParallel give and take states of shards; for other models nothing happens."""
    if not is_fsdp1(model):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    # Not FULL_STATE_DICT on rank 0: torch frees the gathered memory before it was copied, where it is the host's.
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        yield


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that mean one parameter, as the user wrote them."""
    if hasattr(model, "holdings"):  # a pipeline, which has each parameter once
        return model.holdings.ties
    inner = _unwrapped(model)
    groups: dict[Any, list[str]] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = [canonical_names(names) for names in groups.values() if len(names) > 1]
    for prefix, module in inner.named_modules() if is_fsdp1(model) else ():
        # The parameter whose memory it is comes first.
        for info in torch_private.shared_members(module):
            inside = [(info.prim_module_name, info.prim_param_name), (info.module_name, info.param_name)]
            tied.append(canonical_names(".".join(part for part in (prefix, *pair) if part) for pair in inside))
    return tied


# -- what is no model and no optimizer ---------------------------------------------------------------------------------

# Where a rank's file keeps the positions of its loaders, and the states of stateful ones. Other readers look only for keys they know.
POSITIONS, LOADERS = "dataloader_positions", "dataloader_states"


@dataclass(frozen=True)
class Common:
    """The objects that every strategy saves, all but models and optimizers, in order; and their rank."""

    schedulers: Sequence[Any]
    dataloaders: Sequence[Any]
    custom: Sequence[Any]
    scaler: Any | None
    process_index: int
    device: torch.device

    @classmethod
    def of(cls, accelerator: Run, schedulers: Sequence[Any]) -> "Common":
        """Return those of an Accelerator, with the schedulers that its strategy saves."""
        loaders, custom, rank = accelerator._dataloaders, accelerator._custom_objects, accelerator.process_index
        return cls(schedulers, loaders, custom, accelerator.scaler, rank, accelerator.device)

    def shared(self) -> list[tuple[Any, str, str]]:
        """Return the objects whose state one rank writes, their files, and what an error calls one that has none."""
        found = [(obj, manifest.custom_file(n), f"registered object {n}") for n, obj in enumerate(self.custom)]
        found += [(obj, manifest.scheduler_file(n), f"scheduler {n}") for n, obj in enumerate(self.schedulers)]
        return found if self.scaler is None else [*found, (self.scaler, SCALER_NAME, "")]

    def loaders(self) -> list[Any]:
        """Return the loaders, those inside torch_xla's in place of these."""
        found = []
        for loader in self.dataloaders:
            inner = vars(loader).get("dataloader")
            found.append(inner if isinstance(inner, PreparedLoader) else loader)
        return found


def keeps_state(loader: Any) -> bool:
    """Say whether a loader is stateful, as torchdata's are."""
    return is_stateful(loader.base_dataloader if isinstance(loader, PreparedLoader) else loader)


# -- taking states -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """A model's state, no copy, by the names of the user, and for each the name in the model's own state dict."""

    values: dict[str, Any]
    own: dict[str, str]


@quietly()
def model_state(model: nn.Module, getter: Callable[..., Any] | None = None) -> ModelState:
    """Return a model's state by the names the user wrote, each rank with its shards. It is no copy. All ranks.

    A `getter` takes the model and ``sd_options``, torch's options or None.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = None if is_fsdp1(model) else StateDictOptions()
    with _fsdp1(model):
        if getter is not None:
            state = getter(model, sd_options=options)
        else:
            state = model.state_dict() if options is None else get_model_state_dict(model, options=options)
    names = canonical_names(state)
    return ModelState(dict(zip(names, state.values(), strict=True)), dict(zip(names, state, strict=True)))


def parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the user's names of an optimizer's parameters, for each group; ValueError for one of no model."""
    return list(map(canonical_names, _names_in_modules(optimizer, model)))


def owner(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> tuple[nn.Module | None, list[list[str]]]:
    """Return the model that an optimizer updates, or None, and the names of its parameters, for each group."""
    for model in models:
        with contextlib.suppress(ValueError):
            return model, parameter_names(optimizer, model)
    return None, []


def names_file(optimizers: Iterable[torch.optim.Optimizer], models: Collection[nn.Module]) -> bytes | None:
    """Return the content of the file that says which parameters the optimizers' numbers mean; None without any."""
    if any(
        hasattr(model, "holdings") for model in models
    ):  # no rank has all, and shards of optimizers have names themselves
        return None
    names = [owner(optimizer, models)[1] for optimizer in optimizers]
    known = {index: groups for index, groups in enumerate(names) if groups}
    return names_text(known) if known else None


def names_text(known: Mapping[int, Sequence[Sequence[str]]]) -> bytes:
    """Return the content of that file; `known` has `parameter_names` by the index of the optimizer."""
    return (json.dumps(known, indent=1) + "\n").encode()


def _names_in_modules(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    flat = is_fsdp1(model)
    for name, parameter in _unwrapped(model).named_parameters():
        # Of FSDP1's flat parameter: the names below its module.
        inside = torch_private.member_names(parameter) if flat else None
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
    """Return torch's optimizer out of what wraps it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of torch's optimizer, no copy, with values of few bits as a checkpoint holds them. Any rank, alone."""
    raw = optimizer.state_dict()
    return {**raw, "state": mapped_leaves(raw["state"], low_bit.plain)} if low_bit.makes(optimizer) else raw


@quietly()
def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state keyed by the names of parameters, each rank with its shards; no copy. All ranks.

    Unlike torch's `get_optimizer_state_dict` it does not step an optimizer that has not stepped yet: that would count.
    ValueError for a parameter that the model does not have.
    """
    inner = inner_optimizer(optimizer)
    groups = parameter_names(optimizer, model)
    if is_fsdp1(model):
        if simulated.current() is not None:  # torch asks others for the names of what this rank has no part of
            return inner.state_dict()
        from torch.distributed.fsdp import FullyShardedDataParallel

        with _fsdp1(model):
            raw = FullyShardedDataParallel.optim_state_dict(_unwrapped(model), inner, group=_group(model))
        names = [key for key in (*raw["state"], *_flat(raw["param_groups"])) if isinstance(key, str)]
        return renamed(raw, dict(zip(names, canonical_names(names), strict=True)))
    raw = plain_state(inner)
    return renamed(raw, dict(zip(_flat(raw["param_groups"]), itertools.chain(*groups), strict=True)))


def _group(model: nn.Module) -> Any:
    """Return the process group that FSDP1 gathers optimizer states in, None for the default one."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    outer = next(module for module in model.modules() if isinstance(module, FullyShardedDataParallel))
    return None if outer.sharding_strategy in hybrid else outer.process_group


@quietly()
def gathered(state: Any) -> Any:
    """Return a state with whole tensors on rank 0's host, gathered one by one; None for them elsewhere. All ranks."""
    main = rank_and_size()[0] == 0

    def gather(value: Any) -> Any:
        value = _gather_shards(value) if is_sharded_tensor(value) else full(value)
        if not main:
            return None
        return value.cpu() if isinstance(value, torch.Tensor) else value

    return mapped_leaves(state, gather)


def full(value: Any) -> Any:
    """Return the whole of a DTensor, gathered on each rank, and other values as they are. All ranks that share it."""
    if is_dtensor(value):
        value = value.detach().to(value.device_mesh.device_type).full_tensor()  # one that is offloaded, too
    # Torchao's weights that are gathered in 8 bits are wrappers around one tensor.
    parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
    value = getattr(value, parts[0]) if parts == ["_tensor"] else value
    return value.detach() if isinstance(value, torch.Tensor) else value


def tied_again(model: nn.Module) -> set[str]:
    """Return the names of a model's state whose tensor comes under an earlier name. Any rank, alone."""
    return {name for names in tied_names(model) for name in names[1:]}


def collected(entries: Entries, model: nn.Module, everywhere: bool = False) -> dict[str, Any]:
    """Return copies of a model's whole entries, under all their names. All ranks.

    They are in host memory on rank 0, and nowhere else; with `everywhere` on each rank's device.
    """
    state: dict[str, Any] = {}
    for name, value in entries:
        if isinstance(value, torch.Tensor):
            value = value.to(value.device if everywhere else "cpu", copy=True)
        if everywhere or rank_and_size()[0] == 0:
            state[name] = value
    for first, *others in tied_names(model):
        state |= {name: state[first] for name in others if first in state}
    return state


def _gather_shards(value: Any) -> torch.Tensor | None:
    """Return the whole of a ShardedTensor on rank 0; where each node has all shards, the node of rank 0 gathers them."""
    if 0 not in dist.get_process_group_ranks(torch_private.group_of(value)):
        return None
    whole = None
    if dist.get_rank() == 0:
        whole = torch.empty(value.size(), dtype=value.dtype, device=torch_private.gathering_device(value))
    value.gather(0, whole, dtype=value.dtype)
    return whole


# -- giving states back ------------------------------------------------------------------------------------------------


@quietly()
def empty_on_host_like(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return new memory of the host for what this rank has of a tensor, with the same knowledge of the whole."""
    dtype = dtype or value.dtype
    if not is_sharded_tensor(value):
        return torch.empty_like(value.detach(), dtype=dtype, device="cpu")
    made = torch.empty_like(value, dtype=dtype)
    return made if all(shard.tensor.device.type == "cpu" for shard in made.local_shards()) else made.cpu()


def address_of(value: Any) -> int | None:
    """Return the address of the memory of a tensor, or of a DTensor's part on this rank; None if that is not plain memory."""
    tensor = value.to_local() if hasattr(value, "to_local") else value
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, nn.Parameter) else None


def is_models_memory(state: ModelState, model: nn.Module) -> bool:
    """Say whether a model's state is the model's own memory: hooks may return copies, and FSDP1 does."""
    held = set(map(address_of, (*model.parameters(), *model.buffers())))
    return None not in held and held.issuperset(map(address_of, state.values.values())) and not is_fsdp1(model)


def local_tensor(value: Any) -> torch.Tensor:
    """Return what this rank has of a tensor; empty, if nothing. Without gradients it is the tensor that a DTensor or ShardedTensor holds."""
    if hasattr(value, "local_shards"):  # a ShardedTensor
        shards = value.local_shards()
        value = shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
    return value.to_local() if hasattr(value, "to_local") else value


def local_part(value: Any) -> torch.Tensor:
    """Return what this rank has of a tensor, detached; it is no copy."""
    return local_tensor(value).detach()


@quietly()
def apply_model(
    model: nn.Module,
    state: Mapping[str, Any],
    own: ModelState,
    setter: Callable[..., Any] | None = None,
    strict: bool = True,
) -> Any:
    """Give a model a state, sharded as its own, by the user's names; return missing and unexpected keys. All ranks.

    A `setter` takes the model, the state and ``sd_options``, torch's options or None, loads it and returns the keys.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options, missing = StateDictOptions(strict=strict), []
    if is_fsdp1(model):
        options = None
        if not strict:  # FSDP1 takes all of its parameters, or none
            missing = [name for name in own.values if name not in state]
            state = {**{name: own.values[name] for name in missing}, **state}
    state = {own.own.get(name, name): value for name, value in state.items()}
    with _fsdp1(model):
        if setter is not None:
            keys = setter(model, state, sd_options=options)
        elif options is None:
            keys = model.load_state_dict(state)
        else:
            keys = set_model_state_dict(model, state, options=options)
    if missing:
        keys = torch_private.IncompatibleKeys([*keys.missing_keys, *missing], keys.unexpected_keys)
    return keys


@quietly()
def optimizer_to_load(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state, keyed by names, sharded as the model, as the optimizer's `load_state_dict` takes it. All ranks."""
    if not is_fsdp1(model):
        return numbered(state)
    from torch.distributed.fsdp import FullyShardedDataParallel

    # FSDP1's names keep what torch.compile put into them.
    own = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    written = list(itertools.chain.from_iterable(_names_in_modules(optimizer, model)))
    kept = [".".join(step for step in name.split(".") if step not in own) for name in written]
    raw = renamed(state, dict(zip(canonical_names(written), kept, strict=True)))
    with _fsdp1(model):
        inner = inner_optimizer(optimizer)
        return FullyShardedDataParallel.optim_state_dict_to_load(_unwrapped(model), inner, raw, group=_group(model))


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state keyed by names as torch takes it: by numbers, and what belongs to no parameter last."""
    order = {name: number for number, name in enumerate(_flat(state["param_groups"]))}
    states = {name: state["state"][name] for name in order if name in state["state"]} | state["state"]
    return {**state, **renamed({**state, "state": states}, order)}


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state keyed in another way: by names, or by numbers.

    Some optimizers keep what belongs to no parameter beside the parameters' states; its keys stay.
    """
    groups = [{**group, "params": [names.get(key, key) for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {names.get(key, key): value for key, value in state["state"].items()}, "param_groups": groups}


def _flat(groups: Any) -> Iterator[str]:
    return itertools.chain.from_iterable(group["params"] for group in groups)
