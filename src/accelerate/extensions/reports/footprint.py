"""The parameters of a prepared model on this rank: dtypes at rest and in use, full and local sizes, per strategy."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import canonical_name
from accelerate.precision.master import short, size
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import local_part


@dataclass(frozen=True)
class Piece:
    """One parameter in the form of its strategy.

    Attributes:
        dtype: Of the copy at rest, which optimizers update.
        numel: Elements of the full tensor.
        here: Elements on this rank.
        whole: Elements here while the strategy has gathered the tensor (a slice of it under tensor parallelism).
        compute: Dtype of the parameter in forward.
        reduce: Dtype in which its gradient is exchanged, before a communication hook.
        unreduced: Dtype of the gradient on this rank while nothing is exchanged.
        gradient: Dtype of the gradient at rest.
        strategy: ``"fsdp1"``, ``"fsdp2"``, ``"zero3"``, or ``""`` for a parameter that is not sharded over data-parallel ranks.
    """

    name: str
    dtype: torch.dtype
    trainable: bool
    numel: int
    here: int
    whole: int
    compute: torch.dtype
    reduce: torch.dtype
    unreduced: torch.dtype
    gradient: torch.dtype
    strategy: str = ""


def pieces(model: nn.Module) -> list[Piece]:
    """Return the parameters of a model, prepared or not, tied ones once. Not a collective."""
    flat = list(_flat_pieces(model))
    members = {identity for _, identities in flat for identity in identities}
    sharded = {id(shard): details for shard, details, _ in torch_private.sharded_parameters(model)}
    all_pieces = [piece for piece, _ in flat]
    for name, parameter in model.named_parameters():
        if id(parameter) not in members:
            all_pieces.append(_piece(plain_name(model, name), parameter, sharded.get(id(parameter))))
    return all_pieces


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name that a tensor of a prepared model has in the user's model."""
    name = canonical_name(name)
    inner = getattr(model, "_orig_mod", model)
    wrapped = isinstance(inner, nn.parallel.DistributedDataParallel) or zero_stage(inner) is not None
    return name.removeprefix("module.") if wrapped else name


def zero_stage(model: nn.Module) -> int | None:
    """Return the ZeRO stage of a DeepSpeed engine; None for any other model."""
    stage = getattr(model, "zero_optimization_stage", None)
    return None if stage is None else int(stage())


def engine_updates(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that a DeepSpeed engine's optimizer updates on this rank: from stage 1 on, a flat part of the copies."""
    # Stage 3 shows torch its parts only while it steps.
    flat = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    groups = getattr(engine.optimizer, "param_groups", ())
    return [parameter for group in groups for parameter in group["params"]] if flat is None else list(flat)


def tensors_here(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return this rank's tensors of a model by kind, for any strategy; some appear more than once.

    "optimizer" has the tensors that DeepSpeed updates instead of the parameters, without states of optimizers.

    Not a collective.
    """
    parameters, updated = list(model.parameters()), []
    gradients = [parameter.grad for parameter in parameters]
    parameters += [getattr(parameter, "ds_tensor", None) for parameter in parameters]  # of ZeRO 3
    if zero_stage(model) is not None:
        zero, updated = model.optimizer, engine_updates(model)
        gradients += [part.grad for part in updated]
        gradients += [getattr(zero, "grad_partitions_flat_buffer", None)]
        gradients += itertools.chain.from_iterable(filter(None, getattr(zero, "averaged_gradients", {}).values()))
    # While nothing is exchanged, the full gradients exist next to the parameters.
    gradients += itertools.chain.from_iterable(whole for *_, whole in torch_private.sharded_parameters(model))
    gradients += itertools.chain.from_iterable(map(torch_private.flat_gradients, model.modules()))
    kinds = {"parameters": parameters, "buffers": model.buffers(), "gradients": gradients, "optimizer": updated}
    return {kind: [tensor for tensor in tensors if tensor is not None] for kind, tensors in kinds.items()}


def _piece(name: str, parameter: nn.Parameter, owner: Any) -> Piece:
    local, dtype = local_part(parameter).numel(), parameter.dtype
    piece = Piece(name, dtype, parameter.requires_grad, parameter.numel(), local, local, dtype, dtype, dtype, dtype)
    if (part := getattr(parameter, "ds_tensor", None)) is not None:
        return replace(piece, numel=parameter.ds_numel, here=part.numel(), whole=parameter.ds_numel, strategy="zero3")
    return piece if owner is None else replace(piece, strategy="fsdp2", **owner)


def _flat_pieces(model: nn.Module) -> Iterator[tuple[Piece, set[int]]]:
    """Yield what FSDP1 flattened, with the identities under which `named_parameters` shows it."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for prefix, module in model.named_modules() if wrapper is not None else ():
        for shown, details in torch_private.flat_parameters(module) if isinstance(module, wrapper) else ():
            name = canonical_name(f"{prefix}.{details['name']}" if prefix else details["name"])
            yield Piece(**{**details, "name": name, "strategy": "fsdp1"}), shown


def no_sync_memory_note(model: nn.Module) -> str:
    """Return a note on the cost of full gradients between exchanges under FSDP; "" if there is none.

    Not a collective.
    """
    trained = [piece for piece in pieces(model) if piece.trainable and piece.strategy]
    whole = sum(piece.whole * piece.unreduced.itemsize for piece in trained)
    shards = sum(piece.here * piece.gradient.itemsize for piece in trained)
    if whole <= shards:
        return ""
    count = sum(piece.whole for piece in trained)
    kinds = " and ".join(sorted({short(piece.unreduced) for piece in trained}))
    return (
        f"Accumulating without synchronisation (no_sync) adds up unsharded gradients in {kinds} on each rank: those of {count} "
        f"trainable parameters are {size(whole)}, where this rank's shards are {size(shards)} ({size(whole - shards)} more). "
        "GradientAccumulationPlugin(sync_each_batch=True) keeps only the shards, for a reduce-scatter in each micro-batch."
    )
