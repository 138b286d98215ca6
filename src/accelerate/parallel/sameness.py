"""Whether all ranks bring the same model to be sharded: torch takes each rank's part from that rank, and compares nothing."""

import logging
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.modules.unwrap import canonical_name
from accelerate.parallel import mesh
from accelerate.precision.master import local_part

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

logger = logging.getLogger(__name__)

# Weights that were drawn or loaded differently differ in almost every element, so a few of each tensor tell.
_SAMPLES = 64


@dataclass
class _Account:
    """What a rank tells of its model.

    Attributes:
        copy: which of the parts that tensor parallelism makes it has.
        parameters: by name what has to be the same everywhere.
        meta: names of tensors without memory.
        prints: a checksum for each other tensor.
    """

    copy: int
    parameters: dict[str, str] = field(default_factory=dict)
    meta: set[str] = field(default_factory=set)
    prints: dict[str, int] = field(default_factory=dict)


def agree(
    accelerator: "Accelerator", model: nn.Module, ignored: Collection[nn.Parameter] = (), from_main: bool = False
) -> None:
    """Require the same model of all ranks, and give them the weights of rank 0 where only values differ. All ranks.

    Each rank's shard would otherwise be of another model: replicas of shards would never be equal, and weights that only rank 0
    loaded would be lost in part. It costs one exchange of a few bytes for each tensor; weights travel only if they differ.

    Args:
        accelerator: the Accelerator.
        model: about to be sharded.
        ignored: parameters that stay as they are on each rank.
        from_main: weights are going to be those of rank 0 anyway, so that only names and shapes count.

    Raises:
        ValueError: the ranks have different parameters, or some have weights where others have none; raised on all ranks.
    """
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return
    tensors = _tensors(model, ignored)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, _account(accelerator, tensors))
    first = told[0]
    for rank, other in enumerate(told):
        _compare(type(model).__name__, rank, first.parameters, other.parameters)
        if not from_main and other.meta != first.meta:
            name = min(other.meta ^ first.meta)
            raise ValueError(
                f"{name!r} is on the meta device on rank {rank if name in other.meta else 0} and has values on rank "
                f"{0 if name in other.meta else rank}. To let the weights of rank 0 count, set cpu_ram_efficient_loading=True in the "
                "FullyShardedDataParallelPlugin; else load them on every rank."
            )
    heads = {account.copy: account for account in reversed(told)}
    differing = {
        name for account in told for name, value in account.prints.items() if heads[account.copy].prints[name] != value
    }
    if from_main or not differing:
        return
    if dist.get_rank() == 0:
        logger.warning(
            "%d tensors of %s have other values on other ranks, %r for one; those of rank 0 are used. Build the model after "
            "`set_seed`, or set cpu_ram_efficient_loading=True if only rank 0 loads weights.",
            len(differing),
            type(model).__name__,
            min(differing),
        )
    _send(accelerator, tensors)


def warn_of_ignored(model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Say that nobody averages the gradients of trainable parameters that are left whole. Any rank, alone.

    Args:
        model: about to be sharded.
        ignored: its parameters that stay whole.
    """
    kept = {id(parameter) for parameter in ignored}
    names = [canonical_name(name) for name, p in model.named_parameters() if id(p) in kept and p.requires_grad]
    if names and torch.distributed.get_world_size() > 1 and torch.distributed.get_rank() == 0:
        logger.warning(
            "ignored_modules leaves %d trainable parameters whole, %r for one, and FSDP does not average their gradients: each rank "
            "trains a copy of its own. Freeze them, or average their gradients with `accelerator.reduce(p.grad, 'mean')`.",
            len(names),
            names[0],
        )


def _tensors(model: nn.Module, ignored: Collection[nn.Parameter]) -> dict[str, torch.Tensor]:
    kept = {id(parameter) for parameter in ignored}
    found = {canonical_name(name): value for name, value in model.named_parameters() if id(value) not in kept}
    return found | {canonical_name(name): value for name, value in model.named_buffers()}


def _account(accelerator: "Accelerator", tensors: dict[str, torch.Tensor]) -> _Account:
    account = _Account(mesh.rank(accelerator.torch_device_mesh, "tp"))
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            kind = "trainable" if tensor.requires_grad else "frozen"
            account.parameters[name] = f"{tuple(tensor.shape)}, {tensor.dtype}, {kind}"
        if tensor.is_meta:
            account.meta.add(name)
        else:
            account.prints[name] = _checksum(local_part(tensor).detach())
    return account


def _checksum(tensor: torch.Tensor) -> int:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.numel() or tensor.layout is not torch.strided:
        return 0  # a library's own kind of tensor need not know how to be cut
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    few = flat[:: max(1, len(flat) // _SAMPLES)][: 2 * _SAMPLES]
    return zlib.crc32(few.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _compare(model: str, rank: int, mine: dict[str, str], theirs: dict[str, str]) -> None:
    for name in [*mine, *theirs]:
        here, there = mine.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            raise ValueError(
                f"The ranks prepare different models ({model}): {name!r} is {here} on rank 0 and {there} on rank {rank}. Build the "
                "same model on all ranks, with the same parameters frozen."
            )


def _send(accelerator: "Accelerator", tensors: dict[str, torch.Tensor]) -> None:
    import torch.distributed as dist

    part = mesh.submesh(accelerator.torch_device_mesh, "dp_cp")
    group = None if part is None else part.get_group()
    source = 0 if group is None else dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in tensors.values():
            local = local_part(tensor).detach()
            if tensor.is_meta or not local.numel():
                continue
            sent = local.to(accelerator.device, copy=True).contiguous()
            dist.broadcast(sent, src=source, group=group)
            local.copy_(sent)
