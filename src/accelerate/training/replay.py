"""Steps computed twice: ``ACCELERATE_REPLAY_EVERY=N`` finds devices that compute wrongly in silence, and kernels that are not deterministic.

In each N-th step, what a prepared model's forward starts from is kept: its inputs, the states of random generators, its buffers. After
each backward pass the model runs again from there, backward goes through it again from the same gradients of its outputs, and checksums
are compared: of outputs, and of the gradients that this rank computed, before any exchange. A hook takes those of the second time and
leaves negative zeros, which change no sum, so that gradients stay as they are under every strategy.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate._warn import warn_user
from accelerate.backends.registry import resolve
from accelerate.comm.check import LISTED, listed
from accelerate.data import generators
from accelerate.data.iterable import ends_are_uneven
from accelerate.modules.unwrap import canonical_name
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallel.consistency import checksum
from accelerate.runtime import torch_private, traits
from accelerate.runtime.torch_private import pytree
from accelerate.training.prepared import Facade
from accelerate.training.setup import REPLAY_EVERY


class ReplayDiffers(RuntimeError):
    """A forward and backward pass, computed twice from the same state, gave other bits on some rank. All ranks raise it."""


@dataclass(eq=False)
class Pass:
    """A forward of a prepared model, as it began, and what came of it.

    Attributes:
        autocast: Whether the program's autocast was on around it, and the dtype.
        syncs: Whether DistributedDataParallel was about to send buffers.
        sums: Checksums of the outputs that require gradients.
        gradients: What backward has brought for them so far, by place.
    """

    model: nn.Module
    args: Any
    states: dict[str, Any]
    buffers: list[torch.Tensor]
    autocast: tuple[bool, torch.dtype]
    syncs: bool
    sums: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    doubly: bool = False

    def note(self, place: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of an output; one that has a gradient itself belongs to a loss that no replay can repeat."""
        self.gradients[place] = gradient
        self.doubly |= torch.is_grad_enabled()


def _leaves(values: Any) -> list[torch.Tensor]:
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if tensor.requires_grad]


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _ddp(model: nn.Module) -> Any:
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


class ReplayCheck:
    """Computes each `every`-th step of one Accelerator twice."""

    def __init__(self, accelerator: Facade, every: int) -> None:
        self.accelerator, self.every = accelerator, every
        self._steps: list[int] = []
        self._passes: list[Pass] = []
        self._open: Pass | None = None
        self._hooks: dict[int, list[Any]] = {}
        # Of the backward pass that runs: checksums of gradients, and whether it is the second time.
        self._sums: dict[str, torch.Tensor] = {}
        self._again = False
        self._compared: dict[str, torch.Tensor] = {}
        accelerator.backward = partial(self._backward, accelerator.backward)

    def watch(self, optimizer: AcceleratedOptimizer) -> None:
        """Count the steps of a prepared optimizer, and report before them; ValueError for one that steps in backward."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if hasattr(optimizer.optimizer, "fused_backward") or any(map(torch_private.acts_in_backward, parameters)):
            raise ValueError(
                f"{REPLAY_EVERY}={self.every} with {type(optimizer.optimizer).__name__}, which updates weights during backward: a pass cannot "
                "be computed again from the same weights. Unset the variable, or step after backward."
            )
        self._steps.append(0)
        optimizer._before_step = partial(self._before_step, len(self._steps) - 1, optimizer._before_step)

    def watch_model(self, model: nn.Module) -> None:
        """Keep what the forwards of a prepared model start from, in the steps that are computed twice."""
        model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def clear(self) -> None:
        """Let go of models and optimizers."""
        self._forget()
        self._steps.clear()
        self._compared.clear()

    def _forget(self) -> None:
        self._passes.clear()
        for handle in (handle for handles in self._hooks.values() for handle in handles):
            handle.remove()
        self._hooks.clear()

    # The first time.

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        chosen = any((steps + 1) % self.every == 0 for steps in self._steps)
        if not chosen or self._again or self._open is not None or not torch.is_grad_enabled() or ends_are_uneven():
            return
        kind, wrapper = self.accelerator.device.type, _ddp(model)
        self._open = Pass(
            model,
            pytree.tree_map(_copied, (args, kwargs)),
            generators.collect(self.accelerator.device),
            [buffer.clone() for buffer in model.buffers()],
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            wrapper is not None and wrapper.require_forward_param_sync,
        )

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open is None or self._open.model is not model:
            return  # a prepared model inside another one runs again with that
        done, self._open = self._open, None
        if not (tensors := _leaves(output)):
            return
        done.sums = [checksum(tensor) for tensor in tensors]
        for place, tensor in enumerate(tensors):
            tensor.register_hook(partial(done.note, place))
        if id(model) not in self._hooks:
            # Not before the forward, in which FSDP2 makes what gradients reach.
            leaves = torch_private.gradient_leaves(model).items()
            named = [
                (canonical_name(name).removeprefix("module." if _ddp(model) else ""), leaf) for name, leaf in leaves
            ]
            self._hooks[id(model)] = [leaf.register_hook(partial(self._take, name)) for name, leaf in named]
        self._passes.append(done)

    def _take(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        self._sums[name] = self._sums.get(name, 0) + checksum(gradient)
        return torch.zeros_like(gradient).neg_() if self._again else None

    def _backward(self, method: Callable, loss: Any, *args: Any, **kwargs: Any) -> None:
        self._sums = {}
        method(loss, *args, **kwargs)
        done = [one for one in self._passes if one.gradients]
        self._passes = [one for one in self._passes if not one.gradients]
        if any(one.doubly for one in done):
            self._warn("a loss that contains gradients (create_graph=True) cannot be computed again from the outputs")
        elif done:
            first, self._sums = self._sums, {}
            sums = [total for one in done for total in one.sums]
            with self._as_it_was(done):
                again = self._repeat(done)
            self._compare("output", dict(enumerate(sums)), dict(enumerate(again)))
            self._compare("gradient of", first, self._sums)

    # The second time.

    @contextlib.contextmanager
    def _as_it_was(self, passes: list[Pass]) -> Iterator[None]:
        """Put buffers, generators and what wrappers remember back at the end; gradients stay on their rank meanwhile."""
        accelerator, models = self.accelerator, {id(one.model): one.model for one in passes}
        buffers = [(buffer, buffer.clone()) for model in models.values() for buffer in model.buffers()]
        wrappers = [(ddp, ddp.require_forward_param_sync) for ddp in map(_ddp, models.values()) if ddp is not None]
        states, self._again = generators.collect(accelerator.device), True
        try:
            with contextlib.ExitStack() as held:
                # Whole gradients of shards would be too large: negative zeros are exchanged there.
                if not traits.of(accelerator.distributed_type).sharded:
                    for model in models.values():
                        held.enter_context(resolve(accelerator.state).no_sync(accelerator, model))
                yield
        finally:
            self._again = False
            generators.restore(states, accelerator.device, "a step that is computed twice")
            for ddp, syncs in wrappers:
                ddp.require_forward_param_sync = syncs
            for buffer, value in buffers:
                buffer.data.copy_(value)  # by `data`: graphs of other passes have saved it

    def _repeat(self, passes: list[Pass]) -> list[torch.Tensor]:
        """Run forwards and their backward from what was kept, and return checksums of outputs."""
        outputs, gradients, sums = [], [], []
        kind = self.accelerator.device.type
        for one in passes:
            for buffer, value in zip(one.model.buffers(), one.buffers, strict=True):
                buffer.data.copy_(value)
            if (wrapper := _ddp(one.model)) is not None:
                wrapper.require_forward_param_sync = one.syncs
            generators.restore(one.states, self.accelerator.device, "a step that is computed twice")
            (enabled, dtype), (args, kwargs) = one.autocast, one.args
            with torch.autocast(kind, dtype, enabled) if enabled else contextlib.nullcontext():
                tensors = _leaves(one.model(*args, **kwargs))
            sums += [checksum(tensor) for tensor in tensors]
            outputs += [tensors[place] for place in one.gradients]
            gradients += one.gradients.values()
        torch.autograd.backward(outputs, gradients)
        return sums

    def _compare(self, what: str, first: dict[Any, torch.Tensor], second: dict[Any, torch.Tensor]) -> None:
        for key, value in first.items():
            name = f"{what} {key!r}"
            differs = value != second[key] if key in second else torch.ones_like(value, dtype=torch.bool)
            self._compared[name] = self._compared.get(name, False) | differs

    # The report.

    def _before_step(self, index: int, former: Callable | None, optimizer: AcceleratedOptimizer) -> None:
        self._steps[index] += 1
        if self._steps[index] % self.every == 0 and not ends_are_uneven():
            compared, self._compared = self._compared, {}
            self._forget()
            if not compared:
                self._warn("no output of a prepared model got a gradient through `accelerator.backward`")
            flags = torch.stack([*compared.values()]) if compared else torch.zeros(1, device=self.accelerator.device)
            communicator = self.accelerator._communicator
            if communicator.all_reduce(flags.any().int(), "max"):
                found = [name for name, differs in zip(compared, flags.tolist(), strict=False) if differs]
                raise self._error(
                    f"{self._steps[index]} of {type(optimizer.optimizer).__name__}", found, len(compared)
                )
        if former is not None:
            former(optimizer)

    def _error(self, step: str, found: list[str], count: int) -> ReplayDiffers:
        """Return the error that names the ranks. All ranks."""
        everywhere = self.accelerator._communicator.gather_object((found[:3], len(found), count))
        ranks = [rank for rank, (_, number, _) in enumerate(everywhere) if number]
        lines = "".join(
            f"\n  - rank {rank}: {number} of {of} differ, {', '.join(names)} first"
            for rank, (names, number, of) in enumerate(everywhere)
            if number and rank in ranks[:LISTED]
        )
        return ReplayDiffers(
            f"Step {step}, computed twice from the same state, is not the same on rank {listed(ranks)}:{lines}\nOne rank alone: suspect its "
            "device. Several: kernels that are not deterministic (`set_seed(seed, deterministic=True)` names them), or a loss that uses "
            "weights or inner values of the model beside its outputs."
        )

    def _warn(self, why: str) -> None:
        logged = self.accelerator.prepared.logged
        if why not in logged:
            logged.add(why)
            warn_user(f"{REPLAY_EVERY}={self.every} compared nothing in a step: {why}.")
