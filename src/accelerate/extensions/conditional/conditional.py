"""Modules that a rank may skip in a step, such as the image part of a model if its batch has no images.

The other ranks wait for such a rank: all of them gather sharded weights, and average gradients. So the ranks agree on who
calls the module when the forward of the full model begins. If some ranks call it, the others call it at that point with
inputs that were declared for this, and give zeros to that call in backward. So all ranks gather and reduce the same weights
in the same order. If no rank calls it, its gradients stay None, as in one process. DistributedDataParallel has its own
method, `find_unused_parameters`.
"""

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate.base.nested import leaves, recursively_apply
from accelerate.config.handlers import DistributedDataParallelKwargs
from accelerate.config.strategies import traits_of
from accelerate.extension import Extension
from accelerate.runtime import torch_private
from accelerate.strategies.registry import resolve


@dataclass(frozen=True)
class _Declared:
    """The call of a skipped module for other ranks.

    Attributes:
        argument: The argument of the full model's forward without which the module is not called.
        inputs: The arguments of the call on a rank without that argument.
    """

    argument: str
    inputs: tuple[Any, ...]


def conditional(accelerator: Any, module: nn.Module, given: str, inputs: Any) -> None:
    """Declare a part of a model that some ranks may skip in a step, in which others would wait for them.

    Under FSDP2 the ranks agree with one number for each declared module in each forward, for which the host waits. If some call
    the module, the others also call it, with `inputs` and without gradients. So its parts must be called before other sharded
    blocks, and several such modules in the order of their declarations. DDP finds unused parameters itself.

    Collective: call on every rank, before `prepare`.

    Args:
        module: The part, which belongs to a model that is not prepared yet.
        given: The argument of the full model's forward without which the part is not called: None or an empty tensor.
        inputs: A tensor, or a tuple of arguments, that the part can be called with.

    Raises:
        ValueError: The model is prepared already, or the strategy is another one.

    Example:
        >>> from accelerate import Accelerator
        >>> model = torch.nn.ModuleDict({"text": torch.nn.Linear(2, 1), "pictures": torch.nn.Linear(4, 1)})
        >>> Accelerator(cpu=True).conditional(model["pictures"], given="pictures", inputs=torch.zeros(1, 4))
    """
    kind, traits = accelerator.distributed_type, traits_of(accelerator.distributed_type)
    if any(module in model.modules() for model in accelerator._models):
        raise ValueError("conditional() got a part of a model that is prepared already. Call it before `prepare`.")
    if not any(True for _ in module.parameters()):
        raise ValueError(
            f"conditional() got a {type(module).__name__} without parameters, which needs no declaration."
        )
    if not (traits.sharded and accelerator.is_fsdp2 or resolve(accelerator.state).name in ("ddp", "single")):
        raise ValueError(f"conditional() is not possible with {kind}. Use FSDP with fsdp_version=2, or DDP.")
    if traits.distributed and not traits.sharded:
        accelerator.ddp_handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
        accelerator.ddp_handler.find_unused_parameters = True
    extensions = accelerator.extensions.of_kind(Conditionals)
    extension = extensions[0] if extensions else accelerator.extensions.add(Conditionals(accelerator))
    extension.declared[module] = _Declared(given, inputs if isinstance(inputs, tuple) else (inputs,))


class Conditionals(Extension):
    """The modules that ranks of one run may skip.

    Attributes:
        declared: The modules that `conditional` was called for, while they are alive.
    """

    order = 60

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.declared: WeakKeyDictionary[nn.Module, _Declared] = WeakKeyDictionary()
        self._hooks: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()

    def convert(self, model: Any, evaluation: bool) -> Any:
        """Let the forward of a sharded model begin with an agreement of the ranks on its declared modules."""
        paths = {module: path for path, module in model.named_modules() if module in self.declared}
        if evaluation or not paths or not traits_of(self.run.distributed_type).sharded:
            return model
        for hook in self._hooks.pop(model, ()):  # of a preparation that failed
            hook.remove()
        declared = {paths[module]: part for module, part in self.declared.items() if module in paths}
        self._hooks[model] = _install(self.run, model, declared)
        return model

    def released(self) -> None:
        """Remove the hooks, and forget the declarations."""
        for hook in itertools.chain.from_iterable(self._hooks.values()):
            hook.remove()
        self.run.extensions.remove(self)


def _install(run: Any, model: nn.Module, declared: Mapping[str, _Declared]) -> list[RemovableHandle]:
    """Register hooks by which ranks agree, at each forward, on who calls the declared modules, which are given by name."""
    arguments, name = list(inspect.signature(model.forward).parameters), type(model).__name__
    if unknown := [part.argument for part in declared.values() if part.argument not in arguments]:
        raise ValueError(f"given={unknown[0]!r} is no argument of {name}.forward, which has {arguments}.")
    places = [(arguments.index(part.argument), part.argument) for part in declared.values()]
    trained = [any(weight.requires_grad for weight in model.get_submodule(path).parameters()) for path in declared]
    outputs: list[torch.Tensor] = []  # of calls for other ranks
    joins = False

    def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal joins
        outputs.clear()
        if not torch.is_grad_enabled() and all(group.is_unsharded for group in torch_private.shard_groups(model)):
            joins = False  # nothing is gathered, as in `whole_parameters`, where ranks may run different numbers of forwards
            return
        calls = [_is_there(args[at] if at < len(args) else kwargs.get(argument)) for at, argument in places]
        counts = torch.tensor(calls, dtype=torch.int32, device=run.device)
        ranks = run._communicator.all_reduce(counts, "sum", "a forward with conditional modules").tolist()
        joins = torch.is_grad_enabled() and any(
            trains and count > 0 for trains, count in zip(trained, ranks, strict=True)
        )
        for (path, part), is_called, count in zip(declared.items(), calls, ranks, strict=True):
            if count and not is_called:
                output = _call_for_others(model.get_submodule(path), part.inputs, run.device)
                outputs.extend(filter(_takes_gradients, leaves(output)))

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if joins and not any(map(_takes_gradients, leaves(output))):
            raise TypeError(
                f"{name}.forward returned a {type(output).__name__} in which no tensor with gradients is found, so "
                "the ranks' backward passes would differ. Return a tensor, or tensors in a list, a tuple or a dict."
            )
        if not outputs:
            return output
        return recursively_apply(_Joined.apply, output, *outputs, test_type=_takes_gradients)

    return [model.register_forward_pre_hook(begin, with_kwargs=True), model.register_forward_hook(end)]


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
        output = module(*recursively_apply(ready, inputs))
    for buffer, former in buffers:
        buffer.data.copy_(former)  # `data`: autograd may need the buffer, and would refuse one that has changed
    return output


class _Joined(torch.autograd.Function):
    """A tensor of an output, behind others that get zeros in backward: they come last, because they were made first."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
