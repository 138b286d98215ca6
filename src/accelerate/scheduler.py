"""The prepared learning-rate scheduler: it steps when its optimizers stepped, once per data-parallel replica."""

import functools
import types
import warnings
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelerate.state import AcceleratorState, GradientState


class AcceleratedScheduler:
    """A torch scheduler that follows the optimizers it was prepared with.

    A schedule is written for the batches of *one* process. Where each of n data-parallel replicas takes its own batch,
    one optimizer step uses n of them, so the scheduler advances n times; tensor, context and sequence parallel ranks
    work on the same batch and do not count. With ``split_batches`` the batch is shared out and it advances once.

    Args:
        scheduler: The scheduler to wrap.
        optimizers: The prepared optimizer or optimizers it belongs to.
        step_with_optimizer: Whether it steps with them; False leaves every call to the inner scheduler.
        split_batches: Whether batches are split across processes.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> optimizer, scheduler = accelerator.prepare(inner, torch.optim.lr_scheduler.ExponentialLR(inner, 0.5))
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
        [0.5]
    """

    # Of a schedule restored on another number of replicas: its steps for one optimizer step, and the part of a step it is behind.
    _restored_advance: Fraction | None = None
    _owed = Fraction(0)

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        self.accelerator_state = AcceleratorState() if AcceleratorState._shared_state else None

    @property
    def steps_per_update(self) -> int:
        """How many times the inner scheduler advances for one optimizer step."""
        if self.split_batches or self.accelerator_state is None:
            return 1
        layout = getattr(self.accelerator_state, "parallelism_config", None)
        if layout is not None and not layout._sp_by_deepspeed:
            return layout.data_parallel_size
        return self.accelerator_state.num_processes // (layout.sp_size if layout is not None else 1)

    @property
    def advance(self) -> int | Fraction:
        """How many steps the inner scheduler advances for one optimizer step, also after a resume on other replicas."""
        return self.steps_per_update if self._restored_advance is None else self._restored_advance

    def continue_from(self, saved: Fraction, samples: Fraction) -> str | None:
        """Advance a restored schedule as the run that saved it; return why its rate may differ, None if it does not.

        Args:
            saved: Steps for one optimizer step in that run.
            samples: Samples in an optimizer step of this run, divided by those of that one.
        """
        own, inner = self.steps_per_update, self.scheduler
        self._restored_advance, self._owed = None, Fraction(0)
        if not self.step_with_optimizer or saved == own:
            return None
        # A metric comes once for each evaluation, whatever the number of samples in a step.
        advance = saved if isinstance(inner, ReduceLROnPlateau) else saved * samples
        self._restored_advance = advance if advance != own else None
        numbers = (
            f"{type(inner).__name__} was saved with {saved} steps per optimizer step (one per data-parallel replica) and "
            f"would take {own} in this run"
        )
        if functions := sorted({type(part).__name__ for part in _parts_with_functions(inner)}):
            return (
                f"{numbers}. It takes {advance}, but the function of {functions[0]} is not in the checkpoint, so its learning rate "
                "may differ from the uninterrupted run's. Build it with the step counts of the run that saved it."
            )
        if advance != saved:
            return (
                f"{numbers}. An optimizer step takes {float(samples):g} times the samples, so it takes {advance}: its learning rate "
                "follows the samples, not the optimizer steps. Keep the samples per optimizer step to get the same steps."
            )
        return None

    def check_length(self, updates_per_epoch: int) -> None:
        """Warn when ``total_steps`` cannot fit the optimizer steps that one pass over the prepared loader makes."""
        total = getattr(self.scheduler, "total_steps", None)
        replicas = self.steps_per_update
        if not total or not updates_per_epoch or not self.step_with_optimizer:
            return
        needed = updates_per_epoch * replicas
        counted_per_rank = replicas > 1 and total % needed and not total % updates_per_epoch
        if total < needed or counted_per_rank:
            warnings.warn(
                f"{type(self.scheduler).__name__} was built with total_steps={total}, but one epoch of the prepared "
                f"loader makes {updates_per_epoch} optimizer steps and the scheduler advances {replicas} time(s) for "
                f"each, {needed} in all. Compute total_steps as epochs * {needed} (the length of the loader before "
                "`prepare`), or pass step_scheduler_with_optimizer=False and step it yourself.",
                UserWarning,
                stacklevel=5,  # the line that calls `Accelerator.prepare`
            )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, unless gradients accumulate or an optimizer step was skipped.

        Args:
            *args: Passed to the inner scheduler's ``step``, such as a metric.
            **kwargs: Passed likewise.
        """
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                # Torch warns when a schedule falls behind its own count of steps.
                scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        total = getattr(scheduler, "total_steps", None)
        for _ in range(self.steps_per_update if self._restored_advance is None else self._due()):
            # The last update may ask for more steps than the schedule has left.
            if total is None or scheduler._step_count <= total:
                scheduler.step(*args, **kwargs)

    def _due(self) -> int:
        """Return how many steps of a restored schedule are due."""
        owed = self._owed + self._restored_advance
        self._owed = owed % 1
        return int(owed)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step, one per parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """Return the learning rates that the inner scheduler computes now."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rate as the inner scheduler does."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner scheduler's state."""
        self.scheduler.load_state_dict(state_dict)


# Torch saves the attributes of other callables.
_FUNCTIONS = types.FunctionType | types.MethodType | types.BuiltinFunctionType | functools.partial


def _parts_with_functions(schedule: Any) -> Iterator[Any]:
    """Yield the parts of a schedule that compute rates by a caller's function, which their state does not hold."""
    for value in vars(schedule).values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, LRScheduler):
                yield from _parts_with_functions(part)
            elif isinstance(part, _FUNCTIONS):
                function = part.func if isinstance(part, functools.partial) else part
                if getattr(function, "__module__", None) != LRScheduler.__module__:
                    yield schedule
