"""Modules that a rank may leave out of a step, as the part of a model that reads pictures where its batch has none.

The other ranks wait for such a rank: all of them gather sharded weights, and average gradients. So the ranks agree, when the forward of
the whole model begins, on who calls the module. A rank that does not, while others do, calls it there with inputs that were declared for
this, and gives zeros to that call in backward: all ranks gather and reduce the same weights in the same order. Where no rank calls it, none
does, and its gradients stay None, as in one process. DistributedDataParallel has a way of its own, `find_unused_parameters`.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.base.nested import leaves, recursively_apply
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.config.strategies import traits_of
from accelerate.strategies.registry import resolve
from accelerate.training.run import TrainingRun


@dataclass(frozen=True)
class Conditional:
    """A module that ranks may leave out.

    Attributes:
        module: It, as a part of the user's model.
        given: The argument of the whole model's forward without which it is not called.
        inputs: What a rank without that argument calls it with.
    """

    module: nn.Module
    given: str
    inputs: tuple[Any, ...]


def declare(accelerator: TrainingRun, one: Conditional) -> None:
    """Remember a module for the models that are prepared from now on; ValueError for a strategy that cannot leave it out."""
    kind, known = accelerator.distributed_type, traits_of(accelerator.distributed_type)
    if any(one.module in model.modules() for model in accelerator._models):
        raise ValueError("conditional() got a part of a model that is prepared already. Call it before `prepare`.")
    if not any(True for _ in one.module.parameters()):
        raise ValueError(
            f"conditional() got a {type(one.module).__name__} without parameters, which needs no declaration."
        )
    if not (known.sharded and accelerator.is_fsdp2 or resolve(accelerator.state).name in ("ddp", "single")):
        raise ValueError(f"conditional() is not possible with {kind}. Use FSDP with fsdp_version=2, or DDP.")
    if known.distributed and not known.sharded:
        accelerator.ddp_handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
        accelerator.ddp_handler.find_unused_parameters = True
    accelerator.prepared.conditional.append(one)


def install(accelerator: TrainingRun, model: nn.Module) -> None:
    """Let the forward of a sharded model begin with an agreement of the ranks on what was declared of it. All ranks."""
    paths = {id(module): path for path, module in model.named_modules()}
    declared = [(paths[id(one.module)], one) for one in accelerator.prepared.conditional if id(one.module) in paths]
    if not declared or not traits_of(accelerator.distributed_type).sharded:
        return
    arguments, name = list(inspect.signature(model.forward).parameters), type(model).__name__
    if unknown := [one.given for _, one in declared if one.given not in arguments]:
        raise ValueError(f"given={unknown[0]!r} is no argument of {name}.forward, which has {arguments}.")
    places = [(arguments.index(one.given), one.given) for _, one in declared]
    trained = [any(weight.requires_grad for weight in one.module.parameters()) for _, one in declared]
    others: list[torch.Tensor] = []  # what came out of calls for other ranks
    joins = False

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal joins
        calls = [_is_there(args[at] if at < len(args) else kwargs.get(argument)) for at, argument in places]
        counts = torch.tensor(calls, dtype=torch.int32, device=accelerator.device)
        ranks = accelerator._communicator.all_reduce(counts, "sum", "a forward with conditional modules").tolist()
        joins = torch.is_grad_enabled() and any(map(lambda train, count: train and count > 0, trained, ranks))
        others.clear()
        for (path, one), here, count in zip(declared, calls, ranks, strict=True):
            if count and not here:
                found = _call_for_others(model.get_submodule(path), one.inputs, accelerator.device)
                others.extend(filter(_takes_gradients, leaves(found)))

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if joins and not any(map(_takes_gradients, leaves(output))):
            raise TypeError(
                f"{name}.forward returned a {type(output).__name__} in which no tensor with gradients is found, so "
                "the ranks' backward passes would differ. Return a tensor, or tensors in a list, a tuple or a dict."
            )
        if not others:
            return output
        return recursively_apply(_Joined.apply, output, *others, test_type=_takes_gradients)

    accelerator.prepared.hooks += [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end),
    ]


def _is_there(value: Any) -> bool:
    return value is not None and not (isinstance(value, torch.Tensor) and value.numel() == 0)


def _takes_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _call_for_others(module: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> Any:
    """Call a module, and leave generators and its buffers as they are."""
    dtype = next(module.parameters()).dtype

    def ready(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, dtype if value.is_floating_point() else None)

    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = [] if device.type in ("cpu", "mps") else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        found = module(*recursively_apply(ready, inputs))
    for buffer, former in buffers:
        buffer.data.copy_(former)  # `data`: autograd may need the buffer, and would refuse one that has changed
    return found


class _Joined(torch.autograd.Function):
    """A tensor of an output, behind others that get zeros in backward: they come last, because they were made first."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(one.shape, one.dtype, one.device) for one in others]
        return tensor.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
