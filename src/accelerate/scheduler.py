"""The prepared learning-rate scheduler: it steps when its optimizers stepped, once per data-parallel replica."""

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from accelerate.state import AcceleratorState, GradientState


class AcceleratedScheduler:
    """A torch scheduler that follows the optimizers it was prepared with.

    A schedule is written for the batches of *one* process. If each of n data-parallel replicas takes its own batch,
    one optimizer step uses n of them, so the scheduler advances n times. Tensor, context and sequence parallel ranks work on
    the same batch and do not count. With ``split_batches`` the ranks share one batch, and it advances once.

    No method is a collective.

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

    # How far a restored schedule advances for one optimizer step, where the run that saved it took another number.
    _restored_advance: int | None = None

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
    def advance(self) -> int:
        """How many steps the inner scheduler advances for one optimizer step, also after a resume on other replicas."""
        if self._restored_advance is not None:
            return self._restored_advance
        return self.steps_per_update if self.step_with_optimizer else 1

    def continue_from(self, saved: int | None) -> str | None:
        """Advance a restored schedule as the run that saved it did; return why its rate may differ, None if it does not.

        Args:
            saved: Steps for one optimizer step in that run; None for those of this run.
        """
        self._restored_advance = None
        steps, name = self.advance, type(self.scheduler).__name__
        if saved is None or saved == steps:
            return None
        if not self.step_with_optimizer:
            return (
                f"{name} was saved with {saved} steps per optimizer step, and this run steps it itself "
                f"(step_scheduler_with_optimizer=False). Call its step() {saved} times per optimizer step to keep its learning rate."
            )
        self._restored_advance = saved
        if lacking := sorted(set(_not_in_state(self.scheduler))):
            return (
                f"{name} was saved with {saved} steps per optimizer step (one per data-parallel replica) and would take {steps} in this "
                f"run. It takes {saved}, but the checkpoint does not hold {', '.join(lacking)}, so its learning rate may differ from "
                "the uninterrupted run's. Build it with the step counts of the run that saved it."
            )
        return None

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
        for _ in range(self.advance):
            # The last update may ask for more steps than the schedule has left.
            if total is None or scheduler._step_count <= total:
                scheduler.step(*args, **kwargs)

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


def _not_in_state(schedule: Any) -> Iterator[str]:
    """Yield inputs of a schedule's rates that its state does not hold: functions, and numbers of other schedules."""
    name, state = type(schedule).__name__, schedule.state_dict()
    for attribute, value in vars(schedule).items():
        if type(value) in (int, float) and attribute not in state:
            yield f"{attribute} of {name}"
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, LRScheduler):
                yield from _not_in_state(part)
            elif isinstance(part, _FUNCTIONS):
                function = part.func if isinstance(part, functools.partial) else part
                if not str(getattr(function, "__module__", None)).startswith("torch.optim."):
                    yield f"the function of {name}"
