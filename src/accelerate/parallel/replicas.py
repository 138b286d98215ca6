"""Trainable parameters that every rank has whole beside shards: adapters of a sharded model, and modules that FSDP ignores.

FSDP exchanges the gradients of what it shards alone. Those of whole parameters are averaged after each backward pass that exchanges
gradients. Averaging twice changes nothing, so it does not matter how passes, micro-batches and models share a window.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from accelerate import comm
from accelerate.modules.unwrap import canonical_name
from accelerate.parallel import consistency
from accelerate.precision.master import local_part
from accelerate.runtime.run import Run

logger = logging.getLogger(__name__)

# Elements that are exchanged at a time: few messages, and little memory for the copies.
_BUCKET = 1 << 24


def whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a sharded model that are no DTensors, by name. Any rank, alone."""
    return {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad and local_part(p) is p}


def train_alike(accelerator: Run, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Let `backward` average the gradients of whole parameters that are equal on all ranks. All ranks.

    Those that differ stay each rank's own: a program may keep parts of its own in modules that FSDP ignores.
    """
    if dist.get_world_size() == 1 or any(known is model for known, _ in accelerator.prepared.replicated):
        return
    sums = [consistency.checksum(tensor).to(accelerator.device, non_blocking=True) for tensor in parameters.values()]
    sums = dict(zip(parameters, torch.stack(sums).tolist() if sums else [], strict=True))
    own: list[str] = []
    if not comm.current().is_same(sorted(sums.items())):
        first = comm.current().broadcast_object_list([sums], 0)[0]
        others = comm.current().all_reduce(
            torch.tensor([sums.get(name) != first[name] for name in first]).int(), "max"
        )
        same = {name for name, other in zip(first, others.tolist(), strict=True) if not other}
        own = sorted({*first, *sums} - same)
    alike = {name: parameter for name, parameter in parameters.items() if name not in own}
    if alike:
        accelerator.prepared.replicated.append((model, list(alike.values())))
    if alike and dist.get_rank() == 0:
        logger.warning(
            f"{len(alike)} trainable parameters of {type(model).__name__} are whole on each rank, {next(iter(alike))!r} for one: "
            "`accelerator.backward` averages their gradients."
        )
    if own and dist.get_rank() == 0:
        logger.warning(
            f"{len(own)} trainable parameters in ignored_modules differ between ranks, {own[0]!r} for one, and train apart: their "
            "gradients are not averaged. Build them after `set_seed`, unless each rank is to have its own."
        )


@torch.no_grad()
def average(accelerator: Run, held: Collection[int]) -> None:
    """Average gradients over all ranks, but those of models that `no_sync` holds, by id. All ranks.

    Ranks that share layers or a batch have the same gradients, so that this is the mean over batches, bit for bit the same on all.
    """
    sent = []
    for model, parameters in accelerator.prepared.replicated:
        if id(model) not in held:
            for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                # Beside them goes whether there are any: one that no rank has stays away, as on one process.
                there = gradients[0].new_tensor([parameter.grad is not None for parameter in bucket])
                flat = torch.cat([*(gradient.flatten() for gradient in gradients), there]).div_(dist.get_world_size())
                sent.append((bucket, gradients, flat, dist.all_reduce(flat, async_op=True)))
    for bucket, gradients, flat, work in sent:
        work.wait()
        *means, there = flat.split([*(gradient.numel() for gradient in gradients), len(bucket)])
        torch._foreach_copy_(gradients, [mean.view_as(own) for mean, own in zip(means, gradients, strict=True)])
        if missing := [place for place, parameter in enumerate(bucket) if parameter.grad is None]:
            found = there.tolist()
            for place in missing:
                bucket[place].grad = gradients[place] if found[place] else None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype together, as many as are exchanged at a time."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        filled = sum(other.numel() for other in bucket) + parameter.numel() > _BUCKET
        if bucket and (filled or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
