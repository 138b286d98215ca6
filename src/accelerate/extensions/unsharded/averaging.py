"""Parameters that every rank has unsharded, next to shards: adapters of a sharded model, and modules that FSDP ignores.

FSDP exchanges only the gradients of its shards. Those of unsharded parameters are averaged here, after each backward pass that exchanges
gradients. Averaging twice changes nothing, so passes, micro-batches and models may share an accumulation step in any way.
"""

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate import comm
from accelerate.extension import Extension
from accelerate.extensions.same_model.consistency import checksum
from accelerate.modules.unwrap import canonical_name
from accelerate.runtime.run import Run
from accelerate.runtime.torch_private import local_part

logger = logging.getLogger(__name__)

# Elements that are exchanged at a time: few messages, and little memory for the copies.
_BUCKET = 1 << 24


class UnshardedParameters(Extension):
    """Finds the unsharded parameters of each model that `fully_shard` has sharded: those of modules that it ignores."""

    ignores = False

    def sharding(self, model: Any, ignored: Collection[Any], policies: dict[Any, Any], units: set[Any]) -> None:
        """Note whether parameters stay unsharded. `ignored_modules` are the same on all ranks, so the answer is."""
        self.ignores = bool(ignored)

    def sharded(self, model: nn.Module) -> None:
        """Let `backward` average the gradients of parameters that are no DTensors."""
        if self.ignores:
            register(self.run, model, whole(model))


class Averaging(Extension):
    """Averages gradients after each backward pass; a run has it once a model has unsharded parameters.

    Attributes:
        parameters: The unsharded parameters by model.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.parameters: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()

    def backward_done(self) -> None:
        """Average gradients over the ranks that have them, except those of models that `no_sync` holds.

        Ranks that share layers or a batch have the same gradients, so this is the mean over batches, with the same bits on all.
        """
        for model, parameters in list(self.parameters.items()):
            if id(model) not in self.run._window.held:
                average_gradients(parameters)

    def released(self) -> None:
        """Forget all models."""
        self.run.extensions.remove(self)


def whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a sharded model that are no DTensors, by name. Not a collective."""
    return {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad and local_part(p) is p}


def register(accelerator: Run, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Let `backward` average the gradients of unsharded parameters that are equal on all ranks.

    Parameters that differ stay per-rank: a program may keep per-rank parts in modules that FSDP ignores.

    Collective: call on every rank.
    """
    averaging = next(iter(accelerator.extensions.of_kind(Averaging)), None)
    if dist.get_world_size() == 1 or (averaging is not None and model in averaging.parameters):
        return
    checksums = [checksum(tensor).to(accelerator.device, non_blocking=True) for tensor in parameters.values()]
    sums = dict(zip(parameters, torch.stack(checksums).tolist() if checksums else [], strict=True))
    differing: list[str] = []
    if not comm.current().is_same(sorted(sums.items())):
        first = comm.current().broadcast_object_list([sums], 0)[0]
        others = comm.current().all_reduce(
            torch.tensor([sums.get(name) != first[name] for name in first]).int(), "max"
        )
        same = {name for name, other in zip(first, others.tolist(), strict=True) if not other}
        differing = sorted({*first, *sums} - same)
    replicated = {name: parameter for name, parameter in parameters.items() if name not in differing}
    if replicated:
        averaging = averaging or accelerator.extensions.add(Averaging(accelerator))
        averaging.parameters[model] = list(replicated.values())
    if replicated and dist.get_rank() == 0:
        logger.warning(
            f"{len(replicated)} trainable parameters of {type(model).__name__} are unsharded on each rank, {next(iter(replicated))!r} for one: "
            "`accelerator.backward` averages their gradients."
        )
    if differing and dist.get_rank() == 0:
        logger.warning(
            f"{len(differing)} trainable parameters in ignored_modules differ between ranks, {differing[0]!r} for one, and train differently: their "
            "gradients are not averaged. Build them after `set_seed`, unless each rank is to have its own."
        )


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], group: Any = None) -> None:
    """Average the gradients of plain parameters over a group of ranks that have the same ones, in buckets.

    Collective: call on every rank of the group.
    """
    sent = []
    for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        # The flags show whether any rank has a gradient: if none has, the gradient stays None, as on one process.
        flags = gradients[0].new_tensor([parameter.grad is not None for parameter in bucket])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), flags]).div_(dist.get_world_size(group))
        sent.append((bucket, gradients, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, gradients, flat, work in sent:
        work.wait()
        *means, flags = flat.split([*(gradient.numel() for gradient in gradients), len(bucket)])
        torch._foreach_copy_(gradients, [mean.view_as(target) for mean, target in zip(means, gradients, strict=True)])
        if missing := [place for place, parameter in enumerate(bucket) if parameter.grad is None]:
            present = flags.tolist()
            for place in missing:
                bucket[place].grad = gradients[place] if present[place] else None


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
