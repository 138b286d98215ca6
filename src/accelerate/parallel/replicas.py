"""Trainable parameters that every rank has whole beside shards: adapters of a sharded model, and modules that FSDP ignores.

FSDP exchanges the gradients of what it shards alone. Those of whole parameters are averaged after each backward pass that exchanges
gradients. Averaging twice changes nothing, so it does not matter how passes, micro-batches and models share a window.
"""

import logging
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from accelerate.modules.unwrap import canonical_name
from accelerate.parallel import consistency
from accelerate.parallel.mesh import take_from_first
from accelerate.runtime.run import Run

logger = logging.getLogger(__name__)

# Elements that are exchanged at a time: few messages, and little memory for the copies.
_BUCKET = 1 << 24


def whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a sharded model that are no DTensors, by name. Any rank, alone."""
    from torch.distributed.tensor import DTensor

    return {
        canonical_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    }


def train_alike(accelerator: Run, model: nn.Module, whole: Collection[nn.Parameter], from_first: bool = True) -> None:
    """Let `backward` average the gradients of a model's trainable parameters among `whole`, from equal values on. All ranks.

    With `from_first` the first rank's values count, and ValueError says which name or shape differs. Without, a parameter that
    differs stays each rank's own: a program may keep its parts in modules that FSDP ignores.
    """
    if dist.get_world_size() == 1 or any(known is model for known, _ in accelerator.prepared.replicated):
        return
    chosen = {id(parameter) for parameter in whole}
    ours = {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad and id(p) in chosen}
    described = {name: (f"{tuple(p.shape)}, {p.dtype}", int(consistency.checksum(p))) for name, p in ours.items()}
    seen = [described] * dist.get_world_size()
    dist.all_gather_object(seen, described)
    if from_first:
        for rank, other in enumerate(seen):
            consistency.compare(type(model).__name__, rank, seen[0], other)
        for parameter in ours.values():
            take_from_first(parameter, accelerator.device)
    own = {name for name in set().union(*seen) if any(other.get(name) != seen[0].get(name) for other in seen)}
    alike = {name: parameter for name, parameter in ours.items() if from_first or name not in own}
    if alike:
        accelerator.prepared.replicated.append((model, list(alike.values())))
    if dist.get_rank() == 0:
        if alike:
            logger.warning(
                f"{len(alike)} trainable parameters of {type(model).__name__} are whole on each rank, {next(iter(alike))!r} for one: "
                f"`accelerator.backward` averages their gradients.{' Values differed; those of rank 0 are used.' * bool(own)}"
            )
        if own and not from_first:
            logger.warning(
                f"{len(own)} trainable parameters in ignored_modules differ between ranks, {min(own)!r} for one, and train apart: their "
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
