"""The comparison of a model between ranks, and the weights of rank 0 where they differ."""

import logging
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate import comm
from accelerate.comm.base import Communicator
from accelerate.runtime.run import Run
from accelerate.runtime.torch_private import local_part
from accelerate.strategies import mesh
from accelerate.strategies.shard import tensors_of

logger = logging.getLogger(__name__)

# Weights that were drawn or loaded differently differ in almost every element, so a few of each tensor show it.
_SAMPLES = 64
# Elements summed at a time on a CPU, so that they fit its cache, and the integer type as wide as an element.
_PIECE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15  # spreads places over 64 bits


def require_same_model(
    accelerator: Run, model: nn.Module, ignored: Collection[nn.Parameter] = (), from_main: bool = False
) -> None:
    """Require the same model of all ranks (else ValueError), and rank 0's weights if values differ.

    All ranks. They compare one checksum of names and shapes and one of values; details travel only if those differ. With `from_main`
    values do not count.
    """
    kept = {id(parameter) for parameter in ignored}
    if dist.get_world_size() == 1:
        return
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if id(tensor) not in kept}
    described = {name: _in_words(tensor, from_main) for name, tensor in tensors.items()}
    if not comm.current().is_same(sorted(described.items())):
        raise _first_difference(type(model).__name__, described)
    if from_main or not tensors:
        return
    # Ranks with different parts of split layers compare values among those with the same part.
    shards = mesh.submesh(accelerator.torch_device_mesh, "tp")
    part = (0, 1) if shards is None else (shards.get_local_rank(), shards.size())
    sums = torch.stack([_sampled(tensor).to(accelerator.device, non_blocking=True) for tensor in tensors.values()])
    if not differing(fold(sums)[None], *part):
        return
    names = [[*tensors][place] for place in differing(sums, *part)]
    if dist.get_rank() == 0:
        logger.warning(
            f"{len(names)} tensors of {type(model).__name__} have other values on other ranks, {min(names)!r} for one; "
            "those of rank 0 are used. Build the model after `set_seed`, or set cpu_ram_efficient_loading=True."
        )
    replicas = mesh.submesh(accelerator.torch_device_mesh, "dp_cp") if shards is not None else None
    for tensor in tensors.values():
        take_from_first(tensor, accelerator.device, None if replicas is None else replicas.get_group())


@torch.no_grad()
def take_from_first(tensor: torch.Tensor, device: torch.device, group: Any = None) -> None:
    """Give a tensor (not a meta one) the values that the first rank of a group has.

    Collective: call on every rank of the group.
    """
    local = local_part(tensor).detach()
    if tensor.is_meta or not local.numel():
        return
    sent = local.to(device).contiguous()
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
    torch.distributed.broadcast(sent, src=first, group=group)
    if sent.data_ptr() != local.data_ptr():
        local.copy_(sent)


def extremes(
    numbers: torch.Tensor, part: int = 0, parts: int = 1, communicator: Communicator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum and minimum of whole numbers over the ranks of each of `parts` parts, by one all-reduce.

    Collective: call on every rank.
    """
    words = numbers.new_full((2, parts, len(numbers)), torch.iinfo(torch.int64).min)
    words[0, part], words[1, part] = numbers, ~numbers
    highest, lowest = (communicator or comm.current()).all_reduce(words, "max")
    return highest, ~lowest


def differing(
    numbers: torch.Tensor, part: int = 0, parts: int = 1, communicator: Communicator | None = None
) -> list[int]:
    """Return the indices where whole numbers differ between ranks with the same one of `parts` parts.

    Collective: call on every rank.
    """
    highest, lowest = extremes(numbers, part, parts, communicator)
    return (highest != lowest).any(0).nonzero().flatten().tolist()


def fold(sums: torch.Tensor) -> torch.Tensor:
    """Return one checksum of several in their order, on their device."""
    return (sums * (2 * sums + 1) * (2 * torch.arange(len(sums), device=sums.device) + 1) * _ODD).sum()


def _in_words(tensor: torch.Tensor, from_main: bool) -> tuple[str, bool]:
    """Return shape, dtype and whether it trains, in words; and whether it has no values, where that counts."""
    kind = "trainable" if tensor.requires_grad else "frozen" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {kind}", tensor.is_meta and not from_main


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64) if tensor.is_meta else checksum(tensor, _SAMPLES)


def checksum(tensor: torch.Tensor, samples: int | None = None) -> torch.Tensor:
    """Return a 64-bit checksum of this rank's part of a tensor, or of some of its elements, on its device."""
    tensor = local_part(tensor.detach())
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.numel() or tensor.layout is not torch.strided:
        # A library's own kind of tensor need not know how to be cut.
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    if samples is not None:
        flat = flat[:: max(1, len(flat) // samples)][: 2 * samples]
    # x * (2 * x + 1) is a bijection of words: no single change is lost, and small ones of opposite signs do not cancel.
    pieces = (piece.view(_BITS[piece.element_size()]) for piece in flat.split(_PIECE if flat.is_cpu else 64 * _PIECE))
    total: torch.Tensor = sum((piece * (2 * piece + 1)).sum(dtype=torch.int64) for piece in pieces)
    return total


def _first_difference(model: str, local: dict[str, tuple[str, bool]]) -> ValueError:
    """Return the error of the first rank whose model is described otherwise than that of rank 0.

    Collective: call on every rank.
    """
    communicator = comm.current()
    main = communicator.broadcast_object_list([local], 0)[0]
    absent = ("missing", False)
    names = (name for name in [*main, *local] if main.get(name, absent) != local.get(name, absent))
    name, rank = next(names, None), communicator.rank
    differs = torch.tensor(communicator.world_size if name is None else rank)
    text = ""
    if name is not None:
        (first, hollow), (local_text, _) = main.get(name, absent), local.get(name, absent)
        text = (
            f"The ranks prepare different models ({model}): {name!r} is {first} on rank 0 and {local_text} on rank {rank}. Build the "
            "same model on all ranks, with the same parameters frozen."
        )
        if first == local_text:
            text = (
                f"{name!r} is on the meta device on rank {0 if hollow else rank} and has values on rank {rank if hollow else 0}. "
                "Set cpu_ram_efficient_loading=True, or load weights on every rank."
            )
    return ValueError(communicator.broadcast_object_list([text], int(communicator.all_reduce(differs, "min")))[0])
