"""Consistency check of models about to be sharded: torch takes each rank's part from that rank, and compares nothing."""

import logging
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.modules.unwrap import canonical_name
from accelerate.parallel import mesh
from accelerate.precision import four_bit
from accelerate.precision.master import local_part
from accelerate.runtime.run import Run

logger = logging.getLogger(__name__)

# Weights that were drawn or loaded differently differ in almost every element, so a few of each tensor show it.
_SAMPLES = 64
# Elements that are summed at a time on a CPU, as its cache holds them, and the whole numbers as wide as an element.
_PIECE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_same_model(
    accelerator: Run, model: nn.Module, ignored: Collection[nn.Parameter] = (), from_main: bool = False
) -> None:
    """Require the same model of all ranks (else ValueError), and rank 0's weights if values differ.

    All ranks. It costs one exchange of a few bytes for each tensor; weights travel only if they differ, and with
    `from_main` only names and shapes count.
    """
    kept = {id(parameter) for parameter in ignored}
    if dist.get_world_size() == 1:
        return
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if id(tensor) not in kept}
    # Ranks with different parts of split layers compare values among those with the same part.
    part = mesh.rank(accelerator.torch_device_mesh, "tp")
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (part, {name: _described(tensor) for name, tensor in tensors.items()}))
    first = seen[0][1]
    for rank, (_, other) in enumerate(seen):
        _compare(type(model).__name__, rank, first, other, from_main)
    if from_main:
        return
    heads = dict(reversed(seen))
    differing = {name for part, described in seen for name in described if described[name] != heads[part][name]}
    if not differing:
        return
    if dist.get_rank() == 0:
        logger.warning(
            f"{len(differing)} tensors of {type(model).__name__} have other values on other ranks, {min(differing)!r} for one; "
            "those of rank 0 are used. Build the model after `set_seed`, or set cpu_ram_efficient_loading=True."
        )
    replicas = mesh.submesh(accelerator.torch_device_mesh, "dp_cp")
    for tensor in tensors.values():
        mesh.take_from_first(tensor, accelerator.device, None if replicas is None else replicas.get_group())


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters, scales of 4-bit ones and buffers, also those that a state dict leaves out, each once."""
    named = *model.named_parameters(), *four_bit.scales(model).items(), *model.named_buffers()
    return {canonical_name(name): tensor for name, tensor in named}


def _described(tensor: torch.Tensor) -> tuple[str, int | None]:
    """Return shape, dtype and whether it trains, in words, and a checksum of the values; None on the meta device."""
    kind = "trainable" if tensor.requires_grad else "frozen" if isinstance(tensor, nn.Parameter) else "buffer"
    words = f"{tuple(tensor.shape)}, {tensor.dtype}, {kind}"
    return words, None if tensor.is_meta else int(checksum(tensor, _SAMPLES))


def checksum(tensor: torch.Tensor, samples: int | None = None) -> torch.Tensor:
    """Return a 64-bit checksum of what this rank has of a tensor, or of some of its elements, on its device."""
    tensor = local_part(tensor.detach())
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.numel() or tensor.layout is not torch.strided:
        # A library's own kind of tensor need not know how to be cut.
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    if samples is not None:
        flat = flat[:: max(1, len(flat) // samples)][: 2 * samples]
    # x * (2 * x + 1) maps words onto words, so that no single change is lost, and small ones of opposite signs do not cancel.
    pieces = (piece.view(_BITS[piece.element_size()]) for piece in flat.split(_PIECE if flat.is_cpu else 64 * _PIECE))
    return sum((piece * (2 * piece + 1)).sum(dtype=torch.int64) for piece in pieces)


def _compare(model: str, rank: int, mine: dict[str, Any], theirs: dict[str, Any], from_main: bool) -> None:
    absent = ("missing", 0)
    for name in [*mine, *theirs]:
        (here, value), (there, other) = mine.get(name, absent), theirs.get(name, absent)
        if here != there:
            raise ValueError(
                f"The ranks prepare different models ({model}): {name!r} is {here} on rank 0 and {there} on rank {rank}. Build the "
                "same model on all ranks, with the same parameters frozen."
            )
        if not from_main and (value is None) != (other is None):
            raise ValueError(
                f"{name!r} is on the meta device on rank {0 if value is None else rank} and has values on rank "
                f"{rank if value is None else 0}. Set cpu_ram_efficient_loading=True, or load weights on every rank."
            )
