"""Pipelines that transformers has made (`DistributedConfig(pp_size=)`): each rank has one stage, and they train here, too.

A batch passes through the stages as a whole, one after the other, and all ranks get the logits. Transformers sends hidden states without
gradients; here the backward pass returns these the same way. `Accelerator.prepare_pipeline` keeps all stages busy, from a whole model.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate import comm
from accelerate.parallel.holdings import Holdings
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime import traits
from accelerate.runtime.run import Run

_STAGE = "_pp_stage"  # transformers' name of it


def adopt(accelerator: Run, model: nn.Module) -> None:
    """Let the run follow a pipeline that transformers has made, and let its stages exchange gradients. All ranks.

    Raises:
        ValueError: The run has another strategy, layout or number of ranks; nothing is changed.
    """
    stage, layout, name = getattr(model, _STAGE), accelerator.parallelism_config, type(model).__name__
    engine, size = traits.of(accelerator.distributed_type), stage.pp_size
    if size == 1:
        return
    if derived := layout is None or layout.total_size == 1:
        layout = ParallelismConfig(pp_size=size)
    if layout.pp_size != size or layout.total_size != size or accelerator.num_processes != size:
        raise ValueError(
            f"{name} arrives as a pipeline of {size} stages, and the Accelerator has {layout!r} on {accelerator.num_processes} process(es). "
            f"Start {size} processes, and leave parallelism_config out; or load the model whole, and use accelerator.prepare_pipeline."
        )
    if engine.deepspeed or engine.sharded or accelerator.mixed_precision in ("fp16", "fp8"):
        raise ValueError(
            f"{name} arrives as a pipeline of {size} stages, which train neither with a plugin nor in fp16 or fp8 (distributed_type is "
            f"{accelerator.distributed_type}, mixed_precision={accelerator.mixed_precision!r}). Leave the plugin out, and use 'bf16' or 'no'."
        )
    if derived and accelerator.prepared.dataloaders:
        raise ValueError(
            f"{name} arrives as a pipeline of {size} stages, and a loader was prepared before, which gives each of them other batches. "
            f"Prepare the model first, or pass parallelism_config=ParallelismConfig(pp_size={size})."
        )
    accelerator.state.parallelism_config = layout
    if is_new := not isinstance(stage, TrainableStage):
        model.holdings = _holdings(model, stage)
        setattr(model, _STAGE, TrainableStage(stage))
        model.forward = _with_loss(model, model.forward)
    groups = model.holdings.make_groups(layout.get_device_mesh(accelerator.device.type))
    for key, parameter in model.named_parameters():
        if key not in groups or not parameter.requires_grad:
            continue
        if is_new:  # `backward` takes the mean over the stages that have it, and it is to be their sum
            parameter.register_hook(functools.partial(torch.mul, other=len(model.holdings.holders[key])))
        accelerator.prepared.replicated.append((model, [parameter], groups[key]))


def _holdings(model: nn.Module, stage: Any) -> Holdings:
    """Return which stages have what. All ranks of the pipeline."""
    named = dict((*model.named_parameters(), *model.named_buffers()))
    every: dict[str, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        every.setdefault(next(key for key, own in named.items() if own is tensor), []).append(name)
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}, every, list(model.state_dict())
    told = comm.current().gather_object(mine)
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for own, _, _ in told
        for name, (shape, dtype) in own.items()
    }
    holders = {name: tuple(place for place, (own, _, _) in enumerate(told) if name in own) for name in tensors}
    ties = {tuple(names): None for _, names_of, _ in told for names in names_of.values() if len(names) > 1}
    elsewhere = frozenset(name for _, _, saved in told for name in saved) - {*mine[2]}
    ranks = dist.get_process_group_ranks(stage.pp_group)
    return Holdings(tensors, holders, stage.pp_rank, ranks, stage.pp_group, [[*names] for names in ties], elsewhere)


def _with_loss(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that computes the loss from all logits, which transformers' leaves out, where it is given labels."""

    @functools.wraps(forward)
    def call(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if labels is not None:
            counted = {key: kwargs[key] for key in ("num_items_in_batch",) if key in kwargs}
            size = model.config.get_text_config().vocab_size
            output.loss = model.loss_function(logits=output.logits, labels=labels, vocab_size=size, **counted)
        return output

    return call


class TrainableStage:
    """Transformers' stage, whose messages have gradients.

    Args:
        stage: What transformers has left in the model.
    """

    def __init__(self, stage: Any) -> None:
        self._stage, self._sent = stage, None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stage"], name)

    def communicate(self, operation: str, *, device: torch.device, dtype: torch.dtype, **given: Any) -> Any:
        """Receive hidden states from the stage before, or send them to the next one. Both ranks."""
        message = functools.partial(self._stage.communicate, operation, device=device, dtype=dtype, **given)
        if not torch.is_grad_enabled():
            return message()
        if operation == "recv_forward":
            anchor = torch.empty((), device=device, requires_grad=True)
            return _Received.apply(anchor, message, self._stage)
        self._sent = given["tensor"]
        return message()

    def broadcast_from_last(self, tensor: torch.Tensor | None, **given: Any) -> torch.Tensor:
        """Return the last stage's logits on each rank; the backward pass of others begins with gradients of what they have sent."""
        logits = self._stage.broadcast_from_last(None if tensor is None else tensor.detach(), **given)
        sent, self._sent = self._sent, None
        if tensor is not None:
            return tensor
        if sent is None:  # without gradients
            return logits
        anchor = torch.empty((), device=logits.device, requires_grad=True)
        return _Sent.apply(anchor, sent, logits, self._stage)


def _message(stage: Any, device: torch.device) -> torch.device:
    return torch.device("cpu") if stage.comm_on_cpu else device


class _Received(torch.autograd.Function):
    """Hidden states of the stage before, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, receive: Callable[[], torch.Tensor], stage: Any) -> torch.Tensor:
        ctx.stage = stage
        return receive()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        stage = ctx.stage
        rank = dist.get_global_rank(stage.pp_group, stage.pp_prev_rank)
        dist.send(gradient.to(_message(stage, gradient.device)).contiguous(), rank, group=stage.pp_group)
        return None, None, None


class _Sent(torch.autograd.Function):
    """The logits, computed from hidden states that this rank has sent: their gradient comes from the stage that received them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, sent: torch.Tensor, logits: torch.Tensor, stage: Any) -> torch.Tensor:
        ctx.stage, ctx.like = stage, sent.detach().to("meta")
        ctx.dtype = logits.dtype
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        stage = ctx.stage
        found = torch.empty(ctx.like.shape, dtype=ctx.dtype, device=_message(stage, gradient.device))
        dist.recv(found, dist.get_global_rank(stage.pp_group, stage.pp_next_rank), group=stage.pp_group)
        return None, found.to(gradient.device, ctx.like.dtype), None, None
