"""The states of models and optimizers that are spread over ranks: taken, gathered, and given back.

A model may be wrapped by DistributedDataParallel or FullyShardedDataParallel (with or without the original parameters), be
sharded by `fully_shard`, be split by tensor parallelism, or be plain. Its state has the names of the parameters as the user
wrote them, and that of its optimizer is keyed by them, so that they fit any other of these, on any number of ranks.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.base.constants import SCALER_NAME
from accelerate.checkpoint import manifest
from accelerate.config.enums import DistributedType
from accelerate.data.adapter import is_stateful
from accelerate.data.loader import PreparedLoader
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run

# "full", "sharded", or the name of a `layouts.EngineLayout`.
Layout = str
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
    """Return what each rank gives, small and plain data, in the order of ranks.

    Collective: call on every rank.
    """
    size = rank_and_size()[1]
    given = [value] * size
    if size > 1:
        dist.all_gather_object(given, value)
    return given


def from_first_rank(value: Any) -> Any:
    """Return what rank 0 gives, small and plain data.

    Collective: call on every rank.
    """
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


def mapped_leaves(state: Any, change: Callable[[Any], Any], kind: type = object) -> Any:
    """Return a new state whose values of a `kind`, in nested dictionaries and lists, have been changed."""
    if not isinstance(state, (Mapping, list)):
        return change(state) if isinstance(state, kind) else state
    changed: Any = dict(state) if isinstance(state, Mapping) else list(state)
    for key, value in changed.items() if isinstance(changed, dict) else enumerate(changed):
        if isinstance(value, (Mapping, list)):
            changed[key] = mapped_leaves(value, change, kind)
        elif isinstance(value, kind):
            changed[key] = change(value)
    return changed


# -- kinds of models and tensors ---------------------------------------------------------------------------------------


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor. Asked of its abilities: importing the class takes time, and it has moved."""
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")


def is_sharded_tensor(value: Any) -> bool:
    """Return whether a value is a ShardedTensor, the kind that FSDP1 has."""
    return isinstance(value, torch.Tensor) and hasattr(value, "local_shards")


def is_distributed_tensor(value: Any) -> bool:
    """Return whether a value is a tensor that knows the whole while this rank has a part."""
    return is_dtensor(value) or is_sharded_tensor(value)


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
    """Return whether a loader is stateful, as torchdata's are."""
    return is_stateful(loader.base_dataloader if isinstance(loader, PreparedLoader) else loader)


@quietly()
def gathered(state: Any) -> Any:
    """Return a state with full tensors on rank 0's host, gathered one by one; None for them elsewhere.

    Collective: call on every rank.
    """
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
    made: Any = torch.empty_like(value, dtype=dtype)
    on_host = all(shard.tensor.device.type == "cpu" for shard in made.local_shards())
    memory: torch.Tensor = made if on_host else made.cpu()
    return memory


def local_tensor(value: Any) -> torch.Tensor:
    """Return what this rank has of a tensor; empty, if nothing. Without gradients it is the tensor that a DTensor or ShardedTensor holds."""
    if hasattr(value, "local_shards"):  # a ShardedTensor
        shards = value.local_shards()
        value = shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local


def is_plain_on_host(value: torch.Tensor) -> bool:
    """Return whether this rank's part of a tensor is contiguous memory of the host, which a file may be read over."""
    local = value if type(value) is torch.Tensor else local_tensor(value).detach()
    return type(local) is torch.Tensor and local.device.type == "cpu" and local.is_contiguous() and not local.is_conj()
