"""The prepared optimizer: it steps when gradients are synchronised, through the gradient scaler when there is one."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from accelerate.base import _lazy
from accelerate.config.strategies import traits_of
from accelerate.extension import Extensions
from accelerate.precision import scaling
from accelerate.state import AcceleratorState, GradientState

__getattr__ = _lazy.aliases(__name__)


def patch_optimizer_step(accelerated_optimizer: "AcceleratedOptimizer", method: Callable) -> Callable:
    """Return an optimizer's step method that notes on the wrapper that it ran, and whether it had to.

    Args:
        accelerated_optimizer: The wrapper whose ``_accelerate_step_called`` is set, for a fused optimizer to the tensor that says
            of an overflow; it looks at this itself, on the device.
        method: The inner optimizer's own ``step``.
    """

    def noted_step(*args: Any, **kwargs: Any) -> Any:
        found = getattr(accelerated_optimizer.optimizer, "found_inf", None)
        accelerated_optimizer._accelerate_step_called = True if found is None else found
        return method(*args, **kwargs)

    return noted_step


def _of_inner(name: str, doc: str) -> Any:
    """Return an attribute of a prepared optimizer that is read and assigned in the inner one."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value), doc=doc
    )


def _refuse_traced(optimizer: "AcceleratedOptimizer") -> None:
    kind = optimizer.accelerator_state.distributed_type
    if traits_of(kind).traced:
        raise RuntimeError(
            f"An optimizer that no Accelerator of this process has prepared cannot step with {kind}, since its gradients are not averaged. "
            "Pass it to `accelerator.prepare`."
        )


# Of optimizers that no Accelerator of this process has prepared, copies included.
_UNPREPARED = Extensions()
_UNPREPARED.step_begins = (_refuse_traced,)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that knows about gradient accumulation and gradient scaling.

    ``step`` and ``zero_grad`` do nothing while gradients accumulate. With a scaler, ``step_was_skipped`` says whether
    the last step was skipped because of an overflow. State, parameter groups and defaults are the inner optimizer's,
    which is there as ``optimizer``.

    Args:
        optimizer: The optimizer to wrap.
        device_placement: Whether the optimizer's existing state moves to its parameters' device.
        scaler: The gradient scaler, or None.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.5))
        >>> parameter.sum().backward(); optimizer.step(); parameter.item()
        0.5
    """

    state = _of_inner("state", "The inner optimizer's state.")
    param_groups = _of_inner("param_groups", "The inner optimizer's parameter groups.")
    defaults = _of_inner("defaults", "The inner optimizer's default options.")
    # Those of the Accelerator that prepared it.
    _extensions = _UNPREPARED
    # Whether the inner optimizer updates weights in its backward pass, and has no `step`.
    _steps_in_backward = False

    def __init__(self, optimizer: torch.optim.Optimizer, device_placement: bool = True, scaler: Any = None) -> None:
        # torch's own __init__ is omitted on purpose: it would build a second set of parameter groups.
        self.optimizer = optimizer
        self.scaler = scaler
        self.accelerator_state = AcceleratorState()
        self.gradient_state = GradientState()
        self.device_placement = device_placement
        self._is_overflow: Any = False
        self._zero_takes_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        if scaler is not None:
            self._note_steps()
        if device_placement and optimizer.state:
            # torch's own loading casts each entry to its parameter's device, and leaves what belongs on the host there.
            optimizer.load_state_dict(optimizer.state_dict())

    def _note_steps(self) -> None:
        scaling.register(self)
        self._accelerate_step_called = False
        self._optimizer_original_step_method = self.optimizer.step
        self._optimizer_patched_step_method = patch_optimizer_step(self, self.optimizer.step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer. Not a collective."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict. Not a collective."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state; torch moves each entry to its parameter's device. Not a collective."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Put an optimizer that has modes (schedule-free ones) into training mode. Not a collective."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """Put an optimizer that has modes (schedule-free ones) into evaluation mode. Not a collective."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are still accumulating.

        Not a collective.

        Args:
            set_to_none: Drop the gradients instead of zeroing them; None leaves it to the inner optimizer.

        Raises:
            ValueError: ``set_to_none`` was given, and the inner optimizer does not take it.
        """
        if not self.gradient_state.sync_gradients:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        elif self._zero_takes_none:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            raise ValueError(
                f"set_to_none={set_to_none} was given, but `zero_grad` of {type(self.optimizer).__name__} does not take it."
            )

    def step(self, closure: Callable | None = None) -> None:
        """Update the parameters, unless gradients are still accumulating.

        Collective: call on every rank.

        Args:
            closure: Re-evaluates the model and returns the loss, for optimizers that need it.
        """
        if not self.gradient_state.sync_gradients:
            return
        for hook in self._extensions.step_begins:
            hook(self)
        if self.scaler is None:
            if not self._steps_in_backward:
                self.optimizer.step() if closure is None else self.optimizer.step(closure)
        else:
            self._scaled_step(closure)
        for hook in self._extensions.step_ends:
            hook(self)

    def _scaled_step(self, closure: Callable | None) -> None:
        if "_optimizer_patched_step_method" not in self.__dict__:  # the scaler was assigned after construction
            self._note_steps()
        inner, scaler = self.optimizer, self.scaler
        scaling.flush_update(scaler, inner)  # after a second step in a row
        inner.step = self._optimizer_patched_step_method
        try:
            scaler.step(inner) if closure is None else scaler.step(inner, closure)
        finally:
            inner.step = self._optimizer_original_step_method
        scaling.note_step(scaler, inner)
        called = self._accelerate_step_called
        self._is_overflow = called if isinstance(called, torch.Tensor) else not called
        self._accelerate_step_called = False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was omitted because the scaled gradients overflowed; waits for a fused optimizer's device."""
        self._is_overflow = bool(self._is_overflow)
        return self._is_overflow

    def __getstate__(self) -> dict[str, Any]:
        # The two step methods refer to bound methods of this very process; they are made again when needed.
        hidden = ("_optimizer_original_step_method", "_optimizer_patched_step_method", "_extensions")
        return {key: value for key, value in self.__dict__.items() if key not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.scaler is not None:
            self._note_steps()
