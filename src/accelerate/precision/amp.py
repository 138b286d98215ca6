"""Automatic mixed precision: the autocast context, the wrapped forward, the gradient scaler and its early checks."""

import contextlib
import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate.config.handlers import AutocastKwargs, GradScalerKwargs
from accelerate.precision.base import Precision
from accelerate.utils.operations import convert_to_fp32


def autocast_context(
    device_type: str, row: Precision, handler: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager:
    """Return the autocast context of a precision, or a null context when nothing is cast.

    Args:
        device_type: torch device type that computes, such as ``"cuda"`` or ``"cpu"``.
        row: The precision in force.
        handler: The user's autocast settings; ``enabled=False`` switches autocast off inside the context.

    Example:
        >>> from accelerate.precision.base import precision
        >>> with autocast_context("cpu", precision("bf16")):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16

    Source:
        https://docs.pytorch.org/docs/stable/amp.html
    """
    return _context(device_type, row, handler.to_kwargs() if handler is not None else {})


def _context(device_type: str, row: Precision, options: dict[str, Any]) -> contextlib.AbstractContextManager:
    if row.autocast_dtype is None:
        # Switching autocast off must also work inside somebody else's region.
        return (
            torch.autocast(device_type, enabled=False) if options.get("enabled") is False else contextlib.nullcontext()
        )
    return torch.autocast(device_type, dtype=row.autocast_dtype, **options)


class AutocastForward:
    """A module's forward under autocast, its floating-point outputs returned as float32.

    Args:
        forward: The bound forward to call.
        device_type: torch device type that computes.
        row: The precision in force.
        handler: The user's autocast settings.
    """

    def __init__(
        self, forward: Callable, device_type: str, row: Precision, handler: AutocastKwargs | None = None
    ) -> None:
        self.forward = forward
        self.device_type = device_type
        self.row = row
        self.options = handler.to_kwargs() if handler is not None else {}
        # Signature probes (inspect.signature follows __wrapped__) must see the model's own parameters.
        self.__wrapped__ = forward
        self.__name__ = getattr(forward, "__name__", "forward")
        self.__doc__ = getattr(forward, "__doc__", None)

    def bound_to(self, module: nn.Module) -> "AutocastForward":
        """Return the same for another module of the class, if the forward is the module's own method; else itself."""
        inner = self.forward
        if not isinstance(inner, types.MethodType):
            return self
        other = copy.copy(self)
        other.forward = other.__wrapped__ = types.MethodType(inner.__func__, module)
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward and return its output, floating-point tensors as float32."""
        with _context(self.device_type, self.row, self.options):
            output = self.forward(*args, **kwargs)
        return convert_to_fp32(output)


def wrap_forward(model: nn.Module, device_type: str, row: Precision, handler: AutocastKwargs | None = None) -> None:
    """Make a model's forward run under autocast and return float32, in place and at most once.

    The original is kept as ``model._original_forward``, where ``unwrap_model(keep_fp32_wrapper=False)`` finds it.

    Args:
        model: The module whose ``forward`` is replaced on the instance.
        device_type: torch device type that computes.
        row: The precision in force; one that casts nothing takes off an earlier wrapper.
        handler: The user's autocast settings.
    """
    unwrap_forward(model)  # a deep copy, or a run in another precision, brings the earlier wrapper along
    if row.autocast_dtype is None:
        return
    model._original_forward = model.forward
    model.forward = AutocastForward(model.forward, device_type, row, handler)


def unwrap_forward(model: nn.Module) -> None:
    """Give a model its original forward back, if ``wrap_forward`` replaced it."""
    own = model.__dict__
    if isinstance(own.get("forward"), AutocastForward):
        original = own.pop("_original_forward")
        del own["forward"]
        # A forward that was already replaced on the instance (a hook, a patch) is put back; a class's needs no entry.
        if getattr(original, "__func__", None) is not getattr(type(model), "forward", None):
            model.forward = original


def make_scaler(device_type: str, row: Precision, handler: GradScalerKwargs | None = None) -> Any | None:
    """Return the gradient scaler of a precision, or None when the loss is not scaled.

    Args:
        device_type: torch device type that computes.
        row: The precision in force.
        handler: The user's scaler settings.

    Source:
        https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
    """
    if not row.scales_loss:
        return None
    return torch.amp.GradScaler(device_type, **(handler.to_kwargs() if handler is not None else {}))


def check_weights(model: nn.Module, scaler: Any | None) -> None:
    """Refuse a model that a gradient scaler cannot train, before the first step rather than in it.

    Args:
        model: The model to train.
        scaler: The gradient scaler in force, or None.

    Raises:
        ValueError: A trainable parameter is float16 while gradients are scaled; the message names it.
    """
    if scaler is None or not scaler.is_enabled():
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"The parameter {name!r} is torch.float16, but mixed_precision='fp16' scales gradients and a scaler "
                "cannot unscale float16 gradients. Load the model in float32 (`model.float()`: autocast still computes "
                "in float16), or train it in bfloat16 with mixed_precision='bf16'."
            )
