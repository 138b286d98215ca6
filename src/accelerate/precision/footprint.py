"""What a prepared model's parameters are on this rank: dtypes at rest and in use, whole and local sizes, per strategy."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import canonical_name
from accelerate.precision.master import local_part, short, size


@dataclass(frozen=True)
class Piece:
    """One parameter as a strategy keeps it.

    Attributes:
        dtype: Of the copy at rest, which optimizers update.
        numel: Elements of the whole tensor.
        here: Elements that this rank keeps.
        whole: Elements here while the strategy has gathered the tensor (a slice of it under tensor parallelism).
        compute: Dtype in which the strategy hands it to forward.
        reduce: Dtype in which its gradient is exchanged, before a communication hook.
        unreduced: Dtype of the gradient that this rank keeps while nothing is exchanged.
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
    """Return the parameters of a model, prepared or not, tied ones once. Any rank, alone."""
    flat = list(_flat_pieces(model))
    members = {identity for _, identities in flat for identity in identities}
    sharded = dict(_sharded(model))
    found = [piece for piece, _ in flat]
    for name, parameter in model.named_parameters():
        if id(parameter) not in members:
            found.append(_piece(plain_name(model, name), parameter, sharded.get(id(parameter))))
    return found


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
    """Return what the optimizer of a DeepSpeed engine updates on this rank: from stage 1 on, a flat part of the weights' copies."""
    # Stage 3 shows torch its parts while it steps alone.
    flat = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    groups = getattr(engine.optimizer, "param_groups", ())
    return [parameter for group in groups for parameter in group["params"]] if flat is None else list(flat)


def _piece(name: str, parameter: nn.Parameter, owner: Any) -> Piece:
    here, dtype = local_part(parameter).numel(), parameter.dtype
    piece = Piece(name, dtype, parameter.requires_grad, parameter.numel(), here, here, dtype, dtype, dtype, dtype)
    if (part := getattr(parameter, "ds_tensor", None)) is not None:
        return replace(piece, numel=parameter.ds_numel, here=part.numel(), whole=parameter.ds_numel, strategy="zero3")
    if owner is None:
        return piece
    item, policy = owner
    compute = policy.param_dtype or dtype
    # While nothing is exchanged fully_shard adds gradients up in the dtype of the exchange.
    reduce = policy.reduce_dtype or compute
    whole = math.prod(item._orig_size)
    return replace(piece, whole=whole, compute=compute, reduce=reduce, unreduced=reduce, strategy="fsdp2")


def _sharded(model: nn.Module) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yield the parameters that fully_shard made, with torch's bookkeeping and the dtypes asked for."""
    for group in shard_groups(model):
        for item in group.fsdp_params:
            yield id(item.sharded_param), (item, group.mp_policy)


def shard_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that fully_shard gathers and reduces together."""
    for module in model.modules():
        if (state := getattr(module, "_get_fsdp_state", None)) is not None:
            groups = getattr(state(), "_fsdp_param_groups", None)
            # Older releases have one group in a module, or None.
            yield from filter(None, [state()._fsdp_param_group]) if groups is None else groups


def _flat_pieces(model: nn.Module) -> Iterator[tuple[Piece, set[int]]]:
    """Yield what FSDP1 flattened, with the identities under which `named_parameters` shows it."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is None:
        return
    for prefix, module in model.named_modules():
        handle = module._handle if isinstance(module, wrapper) else None
        if handle is None:
            continue
        flat = handle.flat_param
        originals = flat._params if flat._params is not None else [flat] * len(flat._shapes)
        shown = {id(flat), *map(id, originals), *map(id, getattr(flat, "_shared_params", None) or ())}
        dtype, compute = handle._orig_param_dtype, handle._fwd_bwd_param_dtype
        for name, shape, shard, original in zip(
            flat._fqns, flat._shapes, flat._shard_param_infos, originals, strict=True
        ):
            count = math.prod(shape)
            piece = Piece(
                name=canonical_name(f"{prefix}.{name}" if prefix else name),
                dtype=dtype,
                trainable=original.requires_grad,
                numel=count,
                here=(shard.numel_in_shard or 0) if handle.uses_sharded_strategy else count,
                whole=count,
                compute=compute,
                reduce=handle._reduce_dtype,
                # FSDP1 leaves them as backward computes them.
                unreduced=compute,
                gradient=handle._reduce_dtype if handle._keep_low_precision_grads else dtype,
                strategy="fsdp1",
            )
            yield piece, shown


def no_sync_memory_note(model: nn.Module) -> str:
    """Return what whole gradients between exchanges cost a model that FSDP shards, for reading; "" if nothing. Any rank, alone."""
    trained = [piece for piece in pieces(model) if piece.trainable and piece.strategy]
    whole = sum(piece.whole * piece.unreduced.itemsize for piece in trained)
    shards = sum(piece.here * piece.gradient.itemsize for piece in trained)
    if whole <= shards:
        return ""
    count = sum(piece.whole for piece in trained)
    kinds = " and ".join(sorted({short(piece.unreduced) for piece in trained}))
    return (
        f"Accumulating without synchronisation (no_sync) adds up whole gradients in {kinds} on each rank: those of {count} "
        f"trainable parameters are {size(whole)}, where this rank's shards are {size(shards)} ({size(whole - shards)} more). "
        "GradientAccumulationPlugin(sync_each_batch=True) keeps the shards alone, for a reduce-scatter in each micro-batch."
    )
