"""The gradient scaler of float16 training, which several optimizers may share.

Backward passes leave scaled gradients; clipping and steps need unscaled ones. Optimizers that share a scaler unscale and step at different
times, and an update changes the scale. Three rules keep each gradient in one unit, so that the weights are those of float32:

* Before a backward pass, gradients that were unscaled are scaled again.
* When the scale changes, scaled gradients are rescaled.
* A gradient that optimizers share is unscaled once.
"""

import types
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from accelerate.runtime.torch_private import flat_gradients, flat_parameters, local_part, sharded_parameters

# The overflow flags that `scaler.unscale_` returned for an optimizer: above zero for inf or NaN, by device.
Found = dict[torch.device, torch.Tensor]


@dataclass
class Progress:
    """The states of the gradients of one scaler's optimizers, by the id of the inner optimizer.

    Attributes:
        stepped: Optimizers that stepped since the last update.
        ended: Optimizers that stepped since the last backward pass, whose gradients are used up.
        unscaled: Optimizers that unscaled their gradients since the last backward pass, and their overflow flags.
        sharded: Models that hold gradients outside the parameters while they do not synchronise.
    """

    stepped: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    unscaled: dict[int, Found] = field(default_factory=dict)
    sharded: "weakref.WeakSet[nn.Module]" = field(default_factory=weakref.WeakSet)


# Prepared optimizers with a scaler, and the progress of each scaler's. Kept out of the scaler, which pickles.
_USERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_PROGRESS: "weakref.WeakKeyDictionary[Any, Progress]" = weakref.WeakKeyDictionary()


def register(optimizer: Any) -> None:
    """Note a prepared optimizer, with `optimizer` (the inner one) and `scaler`. Not a collective."""
    _USERS.add(optimizer)


def register_sharded(scaler: Any, model: nn.Module) -> None:
    """Note a model that FSDP has sharded, whose gradients a scaler scales. Not a collective."""
    _progress(scaler).sharded.add(model)


def forget(scaler: Any) -> None:
    """Forget what optimizers have done with their gradients; they are released. Not a collective."""
    _PROGRESS.pop(scaler, None)


def _progress(scaler: Any) -> Progress:
    return _PROGRESS.setdefault(scaler, Progress())


def _users(scaler: Any) -> list[Any]:
    """Return the inner optimizers that share a scaler."""
    return [user.optimizer for user in list(_USERS) if user.scaler is scaler]


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _stage(scaler: Any, optimizer: Any) -> OptState:
    state = scaler._per_optimizer_states.get(id(optimizer))
    return OptState.READY if state is None else state["stage"]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    part = local_part(gradient)
    return part._values() if part.is_sparse else part.detach()


def _multiply(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        part = _values(gradient)
        by_device[part.device].append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


def note_step(scaler: Any, optimizer: Any) -> None:
    """Note that an inner optimizer stepped, and update the scaler if all that share it did.

    Collective: call on every rank.
    """
    progress = _progress(scaler)
    progress.stepped.add(id(optimizer))
    progress.ended.add(id(optimizer))
    if all(id(user) in progress.stepped for user in _users(scaler)):
        flush_update(scaler)


def flush_update(scaler: Any, stepped: Any = None) -> None:
    """Update a scaler if some of its optimizers stepped since the last update.

    A step waits for the steps of the other optimizers, so that one update counts for all. The next loss cannot wait.

    Args:
        scaler: The gradient scaler.
        stepped: Only if this inner optimizer stepped; None for any.
    """
    progress = _PROGRESS.get(scaler)
    if progress is not None and (progress.stepped if stepped is None else id(stepped) in progress.stepped):
        progress.stepped.clear()
        scaler.update()


def before_backward(scaler: Any) -> None:
    """Update a scaler, and scale again the gradients that were unscaled since the last backward pass.

    Collective: call on every rank.
    """
    flush_update(scaler)
    progress = _PROGRESS.get(scaler)
    if progress is None or not progress.unscaled:
        return
    users = {id(user): user for user in _users(scaler)}
    waiting = {id(p) for key, user in users.items() if key not in progress.ended for p in _parameters(user)}
    states, scale, done = scaler._per_optimizer_states, scaler._get_scale_async(), set()
    # The last one knows the overflows that the others found in gradients that it shares with them.
    for key, overflows in reversed(progress.unscaled.items()):
        with_gradient = [p for p in _parameters(users[key]) if p.grad is not None] if key in users else []
        with_gradient = [p for p in with_gradient if id(p) not in done]
        done.update(map(id, with_gradient))
        _multiply([p.grad for p in with_gradient], scale)
        for p in with_gradient:
            if id(p) in waiting:
                _mark(p.grad, overflows)
        if key in states and states[key]["stage"] is OptState.UNSCALED:
            del states[key]
    progress.unscaled.clear()
    progress.ended.clear()


def _mark(gradient: torch.Tensor, overflows: Found) -> None:
    """Put NaN into a gradient after an overflow, which clipping may have hidden from the step; zeros were cleared since."""
    values = _values(gradient)
    for overflow in overflows.values():
        values.masked_fill_((overflow.to(values.device) > 0) & (values != 0), float("nan"))


def unscale(scaler: Any, optimizer: Any) -> None:
    """Unscale the gradients of an inner optimizer, unless they are unscaled already.

    Collective: call on every rank.
    """
    if id(optimizer) not in _progress(scaler).unscaled:
        scaler.unscale_(optimizer)
        _note_unscaled(scaler, optimizer, scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"])


def _note_unscaled(scaler: Any, optimizer: Any, overflows: Found) -> None:
    if any(optimizer is user for user in _users(scaler)):  # torch's own rules hold for others
        _progress(scaler).unscaled[id(optimizer)] = overflows


@contextmanager
def _rescaled(scaler: Any) -> Iterator[None]:
    """Let the scale change, and rescale the scaled gradients of all optimizers; unscaled gradients do not change."""
    states, unscaled = scaler._per_optimizer_states, _progress(scaler).unscaled
    kept = {key: states.pop(key) for key in unscaled if key in states and states[key]["stage"] is OptState.UNSCALED}
    users, scale, sharded = _users(scaler), scaler._get_scale_async(), _progress(scaler).sharded
    former = (
        scale.clone() if scale is not None and (sharded or any(id(user) not in unscaled for user in users)) else None
    )
    yield
    scaler._per_optimizer_states.update(kept)
    if former is not None:
        done = {id(p) for user in users if id(user) in unscaled for p in _parameters(user)}
        parameters = {id(p): p for user in users for p in _parameters(user)}
        gradients = [p.grad for key, p in parameters.items() if p.grad is not None and key not in done]
        for model in sharded:
            gradients += _held_gradients(model, parameters.keys())
        _multiply(gradients, scaler._get_scale_async() / former)


def _held_gradients(model: nn.Module, parameters: Set[int]) -> Iterator[torch.Tensor]:
    """Yield the gradients that FSDP holds outside of parameters, for some parameters by id; all are scaled."""
    for shard, _, gradients in sharded_parameters(model):
        yield from gradients if id(shard) in parameters else ()
    for module in model.modules():
        _, shard = flat_gradients(module)
        if shard is not None and not parameters.isdisjoint(next(flat_parameters(module))[0]):
            yield shard


class GradScaler(torch.amp.GradScaler):
    """torch's scaler with equal overflow flags on all ranks. Optimizers may share it while gradients accumulate."""

    # Whether gradients are shards that do not look like ones, as FSDP1 sets it.
    spread = False

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale, for the next backward pass."""
        if self.is_enabled():
            before_backward(self)
        return super().scale(outputs)

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of an optimizer, prepared or not; a second call before the next backward pass has no effect."""
        while optimizer in _USERS:
            optimizer = optimizer.optimizer
        if (
            not self.is_enabled()
            or id(optimizer) not in _progress(self).unscaled
            or _stage(self, optimizer) is OptState.READY
        ):
            super().unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer, unless its gradients overflowed."""
        # A fused one unscales in its step, also gradients that another optimizer has unscaled.
        if (
            self.is_enabled()
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and self._shared(optimizer)[1]
        ):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Update the scale from the overflow flags of the optimizers that stepped."""
        if self.is_enabled():
            with _rescaled(self):
                super().update(new_scale)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the scale; steps from before no longer count for it."""
        if not self.is_enabled():
            return
        progress, states = _progress(self), self._per_optimizer_states
        for key in progress.stepped:
            states.pop(key, None)
        progress.stepped.clear()
        with _rescaled(self):
            super().load_state_dict(state_dict)

    def _shared(self, optimizer: Any) -> tuple[list[nn.Parameter], list[Found]]:
        """Return an optimizer's parameters with scaled gradients, and the overflow flags of its unscaled ones."""
        parameters, unscaled = _parameters(optimizer), _progress(self).unscaled
        if not unscaled:
            return parameters, []
        overflows = []
        for user in _users(self):
            if id(user) in unscaled:
                shared_ids = set(map(id, _parameters(user)))
                if any(p.grad is not None and id(p) in shared_ids for p in parameters):
                    overflows.append(unscaled[id(user)])
                parameters = [p for p in parameters if id(p) not in shared_ids]
        return parameters, overflows

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Found:
        # Called before each step, fused or not, and by `unscale_`. torch takes no list of DTensors and others.
        parameters, others = self._shared(optimizer)
        sharded = self.spread or any(local_part(parameter) is not parameter for parameter in parameters)
        if sharded:
            parts = [local_part(parameter.grad).detach() for parameter in parameters if parameter.grad is not None]
            for part in parts:
                part.grad = part.detach()
            parameters = parts
        group = types.SimpleNamespace(param_groups=[{"params": parameters}])
        flags = super()._unscale_grads_(group, inv_scale, found_inf, allow_fp16 or sharded)
        flags = flags or {found_inf.device: found_inf}  # without gradients a step changes nothing, as in float32
        if sharded or others:
            for seen in (*flags.values(), *(value for other in others for value in other.values())):
                found_inf = torch.maximum(found_inf, seen.to(found_inf.device))
            if sharded:
                torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX)
            flags = {device: found_inf.to(device) for device in flags}
        _note_unscaled(self, optimizer, flags)
        return flags
