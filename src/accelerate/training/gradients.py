"""Gradients: accumulation steps, scaling, backward, clipping, and when they are synchronised.

An *accumulation step* is the run of micro-batches between two optimizer steps. Its gradients are the mean over the
micro-batches, so each loss is divided by the configured length N. Two opt-in refinements change the weights:

* exact accumulation steps: the last one of an epoch may hold k < N micro-batches, and is then divided by k;
* counted items: with ``num_items`` each micro-batch weighs as many items (tokens, say) as it has, over all ranks.

In both cases the right weight is known only with the last micro-batch of the accumulation step, so the gradients kept so far are
rescaled once, right before its backward pass, and are exact after it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.comm.in_step import ends_are_uneven
from accelerate.config.strategies import traits_of
from accelerate.modules.unwrap import is_compiled_module
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision import scaling
from accelerate.runtime.torch_private import local_part
from accelerate.strategies.base import Strategy
from accelerate.training.run import TrainingRun
from accelerate.training.window import Window


def reset(accelerator: TrainingRun) -> None:
    """Forget the accumulation step that is open: its gradients are gone, or are about to be. Not a collective."""
    accelerator._window = Window()
    accelerator.gradient_state._set_sync_gradients(True)


class Accumulation:
    """The context of one micro-batch: decides whether gradients are synchronised in it, and with which weight."""

    __slots__ = ("accelerator", "models", "num_items", "held")

    def __init__(self, accelerator: TrainingRun, models: Sequence[nn.Module], num_items: Any) -> None:
        self.accelerator = accelerator
        self.models = models
        self.num_items = num_items
        self.held: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        accelerator = self.accelerator
        window = accelerator._window
        window.begin()
        accelerator._do_sync()
        state = accelerator.gradient_state
        window.done = synchronise = state.sync_gradients
        if self.num_items is not None:
            _weigh_items(accelerator, self.num_items, self.models)
        elif synchronise and window.micro_batches < state.num_steps and not window.items.counted:
            _short_window(accelerator, self.models)
        # A rank whose loader ends ends its accumulation step there, while the others' may be open: all have to communicate then.
        if not synchronise and not ends_are_uneven() and not _syncs_each(accelerator, self.num_items is not None):
            strategy = accelerator._strategy
            if strategy.synchronises:
                self.held = contextlib.ExitStack()
                for model in self.models:
                    self.held.enter_context(no_sync(accelerator, strategy, model))
        window.inside = True  # last, because `__exit__` is not called after an error above

    def __exit__(self, *exception: Any) -> None:
        window = self.accelerator._window
        window.inside = False
        window.factor = None
        if self.held is not None:
            self.held.close()
            self.held = None


@contextlib.contextmanager
def no_sync(accelerator: TrainingRun, strategy: Strategy, model: nn.Module) -> Iterator[None]:
    """Enter the strategy's context in which a model's gradients stay on their rank, unsharded ones next to any shards."""
    window = accelerator._window
    before = window.held
    if traits_of(accelerator.distributed_type).sharded:
        window.held |= {id(model._orig_mod if is_compiled_module(model) else model)}
    try:
        with strategy.no_sync(accelerator, model):
            yield
    finally:
        window.held = before


def _syncs_each(accelerator: TrainingRun, counted: bool) -> bool:
    """Whether gradients are exchanged after every micro-batch.

    Those that FSDP keeps unsharded cannot be rescaled, so accumulation steps whose weights are known at their end exchange each time.
    """
    if accelerator._sync_each_batch:
        return True
    return (counted or accelerator._exact_accumulation) and traits_of(accelerator.distributed_type).sharded


def advance(accelerator: TrainingRun) -> None:
    """Count one micro-batch, and set whether gradients are synchronised in it."""
    state = accelerator.gradient_state
    ended = state.sync_with_dataloader and state.end_of_dataloader
    accelerator.step = 0 if ended else accelerator.step + 1
    state._set_sync_gradients(accelerator.step % state.num_steps == 0)


def _rescale(accelerator: TrainingRun, models: Sequence[nn.Module], factor: float) -> None:
    parameters = {id(p): p for model in models or accelerator._models for p in model.parameters()}
    # By their local parts, because torch takes no list of both sharded and plain ones.
    gradients = [local_part(p.grad) for p in parameters.values() if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def _short_window(accelerator: TrainingRun, models: Sequence[nn.Module]) -> None:
    """Give an accumulation step with fewer micro-batches than configured its true mean, or say once that it is not."""
    window, steps = accelerator._window, accelerator.gradient_state.num_steps
    length = window.micro_batches
    if accelerator._exact_accumulation:
        _rescale(accelerator, models, steps / length)
        window.factor = 1.0 / length
    elif not window.warned:
        window.warned = True
        if accelerator.is_main_process:
            warn_user(
                f"The last accumulation step of this epoch has {length} micro-batches instead of "
                f"gradient_accumulation_steps={steps}: it counts {length}/{steps} of a full one. Pass "
                f"GradientAccumulationPlugin(num_steps={steps}, exact=True) to divide by its real length."
            )


def _weigh_items(accelerator: TrainingRun, num_items: Any, models: Sequence[nn.Module] = ()) -> None:
    """Weigh the current micro-batch by its items; in the last one of an accumulation step, fix the weights over all ranks.

    `models` have the gradients that are rescaled; all prepared ones by default. ValueError for a count that is missing
    in some micro-batches, is negative, or cannot be used.
    """
    window, items = accelerator._window, accelerator._window.items
    _check_items(accelerator, num_items)
    items.counted += 1  # also a count that is refused below, so that the next micro-batch may have one
    if items.counted < window.micro_batches:
        raise _mixed(window, num_items)
    count = float(num_items)
    if count < 0:
        raise ValueError(f"num_items={num_items!r} is negative; pass the number of items that the loss averages over.")
    items.items += count
    if not accelerator.gradient_state.sync_gradients:
        window.factor = items.open(count, _expected_items(accelerator, count))
        return
    # Ranks that share each layer, or divide the layers, count the same items.
    layout = accelerator.parallelism_config
    copies = 1 if layout is None else layout.tp_size * layout.pp_size  # type: ignore[operator]  # no size is None
    total = _over_ranks(accelerator, items.items, "sum") / copies
    scale = items.close(total, accelerator.num_processes // copies)
    if items.counted > 1:  # else the gradients belong to another backward pass, which has its weight
        _rescale(accelerator, models, items.reference * scale)
    window.factor = count * scale


def _check_items(accelerator: TrainingRun, num_items: Any) -> None:
    """Refuse a count where losses cannot be weighed."""
    window = accelerator._window
    if not accelerator._scales_loss:
        raise ValueError(
            f"num_items={num_items!r} is not possible with {accelerator.distributed_type}, whose engine divides each loss by "
            "gradient_accumulation_steps. Omit num_items."
        )
    if ends_are_uneven():
        raise ValueError(
            f"num_items={num_items!r} was given inside join_uneven_inputs. Items are counted over all ranks, and here some "
            "may have no batches left. Use even_batches=True without join_uneven_inputs, or omit num_items."
        )
    if window.held:
        raise ValueError(
            f"num_items={num_items!r} was given inside no_sync, where {accelerator.distributed_type} keeps gradients that cannot be "
            "weighed afterwards. Omit no_sync: `accumulate` exchanges gradients in every micro-batch then."
        )


def _expected_items(accelerator: TrainingRun, count: float) -> Callable[[], float] | None:
    """Return what estimates the items of a rank in an accumulation step, where weights have to mean the same on every rank; else None.

    Gradients that are averaged after every micro-batch need such weights. So do those of ranks that share a sequence: through
    attention, the loss of one rank reaches the gradients that another keeps.
    """
    layout = accelerator.parallelism_config
    if _syncs_each(accelerator, True) or (layout is not None and (layout.cp_enabled or layout.sp_enabled)):
        return lambda: _over_ranks(accelerator, count, "mean") * accelerator.gradient_state.num_steps
    return None


def _over_ranks(accelerator: TrainingRun, count: float, how: str) -> float:
    number = torch.tensor([count], dtype=torch.float64 if accelerator.device.type != "mps" else torch.float32)
    return float(accelerator._communicator.all_reduce(number.to(accelerator.device), how).item())


def _mixed(window: Window, num_items: Any) -> ValueError:
    return ValueError(
        "num_items was given for some micro-batches of this accumulation step and not for others (micro-batch "
        f"{window.micro_batches}: num_items={num_items!r}). Give it for every one, or for none."
    )


def backward(accelerator: TrainingRun, loss: torch.Tensor, num_items: Any, options: dict[str, Any]) -> None:
    """Scale a loss for its accumulation step, and run the strategy's backward pass; refuse what is no loss, or no clear count."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"backward() got loss={loss!r} ({type(loss).__name__}); pass the tensor, not `loss.item()`.")
    window = accelerator._window
    if num_items is not None:
        if not window.inside:  # without `accumulate` each call is a micro-batch
            window.begin()
            window.done = accelerator.gradient_state.sync_gradients
        elif window.items.counted == window.micro_batches:
            raise ValueError(
                f"num_items={num_items!r} was given to `backward`, but this micro-batch already has its count. With several "
                "backward passes in one micro-batch give num_items to `accumulate`, once."
            )
        _weigh_items(accelerator, num_items)
    elif window.items.counted and window.inside and window.items.counted != window.micro_batches:
        raise _mixed(window, None)
    factor, divisor = _weight(accelerator)
    loss = loss * factor if factor is not None else loss / divisor if divisor != 1 else loss
    if accelerator.has_lomo_optimizer:
        accelerator.lomo_backward(loss, options.get("learning_rate"))
        return
    accelerator._strategy.backward(accelerator, loss, **options)
    for hook in accelerator.extensions.backward_done:
        hook()


def _weight(accelerator: TrainingRun) -> tuple[float | None, int]:
    """Return what the loss of the current micro-batch is multiplied by, or None and what it is divided by; begin its backward pass."""
    window, steps = accelerator._window, accelerator.gradient_state.num_steps
    factor = window.factor
    if not window.inside:
        window.factor = None
    return factor, steps if accelerator._scales_loss else 1


def loss_factor(accelerator: TrainingRun) -> float:
    """Return the weight of the current micro-batch in its accumulation step, for a backward pass that begins now."""
    factor, divisor = _weight(accelerator)
    return 1.0 / divisor if factor is None else factor


def unscale(accelerator: TrainingRun, optimizer: Any | None) -> None:
    """Divide the loss scale out of the gradients of one optimizer or of all."""
    scaler = accelerator.scaler
    if scaler is None or not scaler.is_enabled():
        return
    optimizers = accelerator._optimizers if optimizer is None else optimizer
    for item in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        while isinstance(item, AcceleratedOptimizer):
            item = item.optimizer
        scaling.unscale(scaler, item)


def _unscale_owners(accelerator: TrainingRun, parameters: Any) -> Any:
    """Unscale the gradients of the optimizers that own parameters, and return the parameters, which an iterator gives once."""
    optimizers = accelerator._optimizers
    if accelerator.scaler is None or len(optimizers) < 2:
        unscale(accelerator, None)
        return parameters
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    ids = set(map(id, parameters))
    owners = [item for item in optimizers if any(id(p) in ids for group in item.param_groups for p in group["params"])]
    unscale(accelerator, owners or None)  # a strategy may have other parameters than the optimizers
    return parameters


def clip_norm(accelerator: TrainingRun, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """Unscale, and clip the gradients to a total norm."""
    parameters = _unscale_owners(accelerator, parameters)
    return accelerator._strategy.clip_grad_norm(accelerator, parameters, max_norm, norm_type)


def clip_value(accelerator: TrainingRun, parameters: Any, clip_value: float) -> None:
    """Unscale, and clip each gradient element; NotImplementedError where the strategy holds shards."""
    if not traits_of(accelerator.distributed_type).clips_by_value:
        raise NotImplementedError(
            f"clip_grad_value_ is not possible with {accelerator.distributed_type}. Use clip_grad_norm_ instead."
        )
    parameters = _unscale_owners(accelerator, parameters)
    accelerator._strategy.clip_grad_value(accelerator, parameters, clip_value)
