"""Pipelines that transformers has made (`DistributedConfig(pp_size=)`): each rank has one stage, and they train here, too.

A batch passes through the stages as a whole, one after the other, and all ranks get the logits. Transformers sends hidden states without
gradients; here the backward pass returns these the same way. `Accelerator.prepare_pipeline` keeps all stages busy, from a whole model.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate import comm
from accelerate.modules.optimizer_remap import ties
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
    if getattr(accelerator, "_replica_check", None) is not None:
        raise ValueError(
            f"{name} arrives as a pipeline of {size} stages, and ACCELERATE_CHECK_EVERY checks what ranks share. Unset it."
        )
    if derived and accelerator._dataloaders:
        raise ValueError(
            f"{name} arrives as a pipeline of {size} stages, and a loader was prepared before, which gives each of them other batches. "
            f"Prepare the model first, or pass parallelism_config=ParallelismConfig(pp_size={size})."
        )
    accelerator.state.parallelism_config = layout
    if not isinstance(stage, TrainableStage):
        model.holdings = _holdings(model, stage)
        stage = TrainableStage(stage, model.holdings.make_groups())
        setattr(model, _STAGE, stage)
        model.forward = _with_loss(model, model.forward)
        for parameter, count, _ in model.holdings.shared(model, stage.groups):
            # `backward` takes the mean over the stages that have it, and it is to be their sum.
            parameter.register_hook(functools.partial(torch.mul, other=count))
    replicated = accelerator.prepared.replicated
    if not any(
        known is model for known, *_ in replicated
    ):  # `prepare` adopts all models, and `prepare_model` each again
        replicated += [
            (model, [parameter], group) for parameter, _, group in model.holdings.shared(model, stage.groups)
        ]


def _holdings(model: nn.Module, stage: Any) -> Holdings:
    """Return which stages have what. All ranks of the pipeline."""
    named = *model.named_parameters(), *model.named_buffers()
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in named}
    mine = kinds, [names for _, names in ties(model)], list(model.state_dict())
    of_ranks = comm.current().gather_object(mine)
    every = {name: kind for own, _, _ in of_ranks for name, kind in own.items()}
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in every.items()}
    holders = {name: tuple(place for place, (own, _, _) in enumerate(of_ranks) if name in own) for name in tensors}
    tied = {tuple(names): None for _, groups, _ in of_ranks for names in groups}
    elsewhere = frozenset(name for _, _, saved in of_ranks for name in saved) - {*mine[2]}
    ranks = dist.get_process_group_ranks(stage.pp_group)
    return Holdings(tensors, holders, stage.pp_rank, ranks, stage.pp_group, [[*names] for names in tied], elsewhere)


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
        groups: The process groups of the tensors that several stages have, by name.
    """

    def __init__(self, stage: Any, groups: Mapping[str, Any]) -> None:
        self._stage, self.groups, self._sent = stage, groups, None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stage"], name)

    def communicate(self, operation: str, *, device: torch.device, dtype: torch.dtype, **given: Any) -> Any:
        """Receive hidden states from the stage before, or send them to the next one. Both ranks."""
        message = functools.partial(self._stage.communicate, operation, device=device, dtype=dtype, **given)
        if not torch.is_grad_enabled():
            return message()
        if operation == "recv_forward":
            anchor = torch.empty((), device=device, requires_grad=True)
            return _Message.apply(message, self._send_gradient, anchor)
        self._sent = given["tensor"]
        return message()

    def broadcast_from_last(self, tensor: torch.Tensor | None, **given: Any) -> torch.Tensor:
        """Return the last stage's logits on each rank; the backward pass of others begins with gradients of what they have sent."""
        logits = self._stage.broadcast_from_last(None if tensor is None else tensor.detach(), **given)
        sent, self._sent = self._sent, None
        if tensor is not None:
            return tensor.to(logits.dtype)
        if sent is None:  # without gradients
            return logits
        like = torch.empty_like(sent, device="meta")
        return _Message.apply(logits.clone, functools.partial(self._receive_gradient, like), sent)

    def _send_gradient(self, gradient: torch.Tensor) -> None:
        """Send the gradient of hidden states to the stage that they came from."""
        rank = dist.get_global_rank(self.pp_group, self.pp_prev_rank)
        dist.send(gradient.to(self._place(gradient)).contiguous(), rank, group=self.pp_group)

    def _receive_gradient(self, like: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Receive that of hidden states `like` these from the next stage, in the dtype of the logits, whose own gradient does not count."""
        found = torch.empty(like.shape, dtype=gradient.dtype, device=self._place(gradient))
        dist.recv(found, dist.get_global_rank(self.pp_group, self.pp_next_rank), group=self.pp_group)
        return found.to(gradient.device, like.dtype)

    def _place(self, gradient: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self.comm_on_cpu else gradient.device


class _Message(torch.autograd.Function):
    """What another rank has sent; instead of its gradient, `exchange` says what goes back to its source on this rank."""

    @staticmethod
    def forward(
        ctx: Any, receive: Callable[[], torch.Tensor], exchange: Callable, source: torch.Tensor
    ) -> torch.Tensor:
        ctx.exchange = exchange
        return receive()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, ctx.exchange(gradient)
