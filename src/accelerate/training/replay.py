"""Steps computed twice: ``ACCELERATE_REPLAY_EVERY=N`` finds devices that compute wrongly in silence, and kernels that are not deterministic.

In each N-th step, what a prepared model's forward starts from is kept: its inputs, the states of random generators, its buffers. After
each backward pass the model runs again from there, backward goes through it again from the same gradients of its outputs, and checksums
are compared: of outputs, and of the gradients that this rank computed, before any exchange. A hook takes those of the second time and
leaves negative zeros, which change no sum, so that gradients stay as they are under every strategy.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate._warn import warn_user
from accelerate.comm.check import LISTED, listed
from accelerate.data import generators
from accelerate.data.iterable import ends_are_uneven
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallel.consistency import checksum
from accelerate.precision.footprint import plain_name
from accelerate.runtime import torch_private, traits
from accelerate.runtime.torch_private import pytree
from accelerate.training.prepared import Facade

# Each how many-th step forward and backward are computed twice.
REPLAY_EVERY = "ACCELERATE_REPLAY_EVERY"


class ReplayDiffers(RuntimeError):
    """A forward and backward pass, computed twice from the same state, gave other bits on some rank. All ranks raise it."""


class State:
    """What else than weights and inputs a model's forward depends on and changes: generators, buffers, DDP's next sending of them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device, self.generators = model, device, generators.collect(device)
        self.buffers = [buffer.clone() for buffer in model.buffers()]
        inner = getattr(model, "_orig_mod", model)
        self.ddp = inner if isinstance(inner, DistributedDataParallel) else None
        self.syncs = getattr(self.ddp, "require_forward_param_sync", None)

    def restore(self) -> None:
        """Put everything back."""
        generators.restore(self.generators, self.device, "a step that is computed twice")
        for buffer, value in zip(self.model.buffers(), self.buffers, strict=True):
            buffer.data.copy_(value)  # by `data`: graphs of other passes have saved it
        if self.ddp is not None:
            self.ddp.require_forward_param_sync = self.syncs


@dataclass(eq=False)
class Pass:
    """A forward of a prepared model, as it began, and what came of it.

    Attributes:
        autocast: The program's own around it: the kind of device, the dtype, and whether it is on.
        gradients: What backward has brought for them so far, by place.
        doubly: A gradient has a gradient itself, so that the loss does not follow from outputs alone.
    """

    number: int
    before: State
    args: Any
    autocast: tuple[str, torch.dtype, bool]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    doubly: bool = False

    def note(self, place: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of an output."""
        self.gradients[place] = gradient
        self.doubly |= torch.is_grad_enabled()

    def outputs(self) -> list[torch.Tensor]:
        """Run the forward again."""
        self.before.restore()
        args, kwargs = self.args
        with torch.autocast(*self.autocast) if self.autocast[-1] else contextlib.nullcontext():
            return _leaves(self.before.model(*args, **kwargs))


def _leaves(values: Any) -> list[torch.Tensor]:
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if tensor.requires_grad]


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


class ReplayCheck:
    """Computes each `every`-th step of one Accelerator twice."""

    def __init__(self, accelerator: Facade, every: int) -> None:
        self.accelerator, self.every = accelerator, every
        self._steps: list[int] = []
        self._passes: list[Pass] = []
        self._open: Pass | None = None
        self._hooks: list[tuple[nn.Module, Any]] = []
        # Checksums of the first and of the second time, by forward or backward pass and name; and which time it is.
        self._sums: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
        self._again, self._number = False, 0
        accelerator.backward = partial(self._backward, accelerator.backward)

    def watch(self, optimizer: AcceleratedOptimizer) -> None:
        """Count the steps of a prepared optimizer, and report before them; ValueError for one that steps in backward."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if optimizer._steps_in_backward or any(map(torch_private.acts_in_backward, parameters)):
            name = type(optimizer.optimizer).__name__
            raise ValueError(
                f"{REPLAY_EVERY}={self.every} with {name}, which updates weights in backward. Unset the variable."
            )
        self._steps.append(0)
        optimizer._before_step = partial(self._before_step, len(self._steps) - 1, optimizer._before_step)

    def watch_model(self, model: nn.Module) -> None:
        """Keep what the forwards of a prepared model start from, in the steps that are computed twice."""
        if self.accelerator.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            # Attention's backward on an H200, for one, adds up in any order.
            warn_user(
                f"{REPLAY_EVERY}={self.every} finds kernels that are not deterministic, too, and ends the run. Call `set_seed(seed, "
                "deterministic=True)` first, so that what it finds is the device."
            )
        model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplayCheck":
        return self  # the copy of a model shares its hooks

    def clear(self) -> None:
        """Let go of models and optimizers."""
        self._forget()
        self._steps.clear()

    def _forget(self) -> None:
        for _, hook in self._hooks:
            hook.remove()
        self._hooks, self._passes, self._sums = [], [], ({}, {})

    # The first time.

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        chosen = any((steps + 1) % self.every == 0 for steps in self._steps)
        if chosen and not self._again and self._open is None and torch.is_grad_enabled() and not ends_are_uneven():
            device = self.accelerator.device
            autocast = (device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
            self._number += 1
            self._open = Pass(self._number, State(model, device), pytree.tree_map(_copied, (args, kwargs)), autocast)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open is None or self._open.before.model is not model:
            return  # a prepared model inside another one runs again with that
        done, self._open = self._open, None
        for place, tensor in enumerate(_leaves(output)):
            self._sums[0][done.number, f"output {place}"] = checksum(tensor)
            tensor.register_hook(partial(done.note, place))
        self._passes.append(done)
        if all(known is not model for known, _ in self._hooks):
            # Not before the forward, in which FSDP2 makes what gradients reach.
            for name, leaf in torch_private.gradient_leaves(model).items():
                self._hooks.append((model, leaf.register_hook(partial(self._take, plain_name(model, name)))))

    def _take(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        sums, key = self._sums[self._again], (self._number, f"gradient of {name!r}")
        sums[key] = sums.get(key, 0) + checksum(gradient)
        return torch.zeros_like(gradient).neg_() if self._again else None

    def _backward(self, method: Callable, loss: Any, *args: Any, **kwargs: Any) -> None:
        self._number += 1
        method(loss, *args, **kwargs)
        done = [one for one in self._passes if one.gradients]
        self._passes = [one for one in self._passes if not one.gradients]
        if any(one.doubly for one in done):
            self._warn("a loss with gradients in it (create_graph=True) does not follow from outputs alone")
        elif done:
            self._repeat(done)

    # The second time.

    def _repeat(self, passes: list[Pass]) -> None:
        """Run forwards and their backward again, and leave everything as it was."""
        accelerator = self.accelerator
        models = {id(one.before.model): one.before.model for one in passes}.values()
        after, self._again = [State(model, accelerator.device) for model in models], True
        try:
            with contextlib.ExitStack() as held:
                # Whole gradients of shards would be too large to keep: negative zeros are exchanged there.
                for model in () if traits.of(accelerator.distributed_type).sharded else models:
                    held.enter_context(accelerator._backend.no_sync(accelerator, model))
                outputs, gradients = [], []
                for one in passes:
                    for place, tensor in enumerate(one.outputs()):
                        self._sums[1][one.number, f"output {place}"] = checksum(tensor)
                        if place in one.gradients:
                            outputs.append(tensor)
                            gradients.append(one.gradients[place])
                torch.autograd.backward(outputs, gradients)
        finally:
            self._again = False
            for state in after:
                state.restore()

    # The report.

    def _before_step(self, index: int, former: Callable | None, optimizer: AcceleratedOptimizer) -> None:
        self._steps[index] += 1
        if self._steps[index] % self.every == 0 and not ends_are_uneven():
            (first, second), nothing = self._sums, torch.zeros((), dtype=torch.bool, device=self.accelerator.device)
            flags = torch.stack([nothing, *(first.get(key, ~value) != value for key, value in second.items())])
            self._forget()
            if not second:
                self._warn("no output of a prepared model got a gradient through `accelerator.backward`")
            if self.accelerator._communicator.all_reduce(flags.any().int(), "max"):
                found = [name for (_, name), differs in zip(second, flags[1:].tolist(), strict=True) if differs]
                raise self._error(f"{self._steps[index]} of {type(optimizer.optimizer).__name__}", found, len(second))
        if former is not None:
            former(optimizer)

    def _error(self, step: str, found: list[str], count: int) -> ReplayDiffers:
        """Return the error that names the ranks. All ranks."""
        text = f"{len(found)} of {count} tensors, first {', '.join(found[:3])}" if found else ""
        seen = {rank: said for rank, said in enumerate(self.accelerator._communicator.gather_object(text)) if said}
        lines = "".join(f"\n  - rank {rank}: {seen[rank]}" for rank in [*seen][:LISTED])
        return ReplayDiffers(
            f"Step {step}, computed twice from the same state, is not the same on rank {listed([*seen])}:{lines}\nOne rank of several: suspect "
            "its device. All: kernels that are not deterministic (`set_seed(seed, deterministic=True)` names them), or a loss that uses "
            "weights or inner values of the model beside its outputs."
        )

    def _warn(self, why: str) -> None:
        if why not in self.accelerator.prepared.logged:
            self.accelerator.prepared.logged.add(why)
            warn_user(f"{REPLAY_EVERY}={self.every} compared nothing in a step: {why}.")
