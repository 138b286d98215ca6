"""Automatic mixed precision: the table of precisions, the autocast context, the wrapped forward, and early checks of the gradient scaler."""

import contextlib
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.comm.operations import convert_to_fp32
from accelerate.config.enums import PrecisionType
from accelerate.config.handlers import AutocastKwargs, GradScalerKwargs
from accelerate.modules.unwrap import AUTOCAST, restore_forward
from accelerate.precision.scaling import GradScaler


@dataclass(frozen=True)
class Precision:
    """The settings of one ``mixed_precision`` value.

    Attributes:
        autocast_dtype: The dtype that forward passes are autocast to; None when they are not.
        scales_loss: Whether gradients can underflow, so that the loss is scaled.
        needs_engine: Whether an fp8 library has to convert the model.
    """

    name: str
    autocast_dtype: torch.dtype | None = None
    scales_loss: bool = False
    needs_engine: bool = False


_TABLE = {
    "no": Precision("no"),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16, scales_loss=True),
    # Outside the converted layers an fp8 run computes in bfloat16.
    "fp8": Precision("fp8", torch.bfloat16, needs_engine=True),
}


def precision(name: str | PrecisionType) -> Precision:
    """Return the table row of a ``mixed_precision`` value; ValueError: there is none."""
    key = getattr(name, "value", name)
    if key not in _TABLE:
        raise ValueError(f"mixed_precision={name!r} is unknown. Choose one of {list(_TABLE)}.")
    return _TABLE[key]


def autocast_context(
    device_type: str, row: Precision, handler: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager:
    """Return the autocast context of a precision, or a null context when nothing is cast."""
    return Autocast(device_type, row, handler).context()


class Autocast:
    """The context that a model's forward runs in."""

    def __init__(self, device_type: str, row: Precision, handler: AutocastKwargs | None = None) -> None:
        self.device_type = device_type
        self.row = row
        self.options = handler.to_kwargs() if handler is not None else {}

    def context(self) -> contextlib.AbstractContextManager:
        """Return the context; a null context when nothing is cast."""
        if self.row.autocast_dtype is not None:
            return torch.autocast(self.device_type, dtype=self.row.autocast_dtype, **self.options)
        # Switching autocast off must also work inside a region of the user's.
        off = self.options.get("enabled") is False
        return torch.autocast(self.device_type, enabled=False) if off else contextlib.nullcontext()

    def run(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a forward in the context, and return its output, floating-point tensors as float32."""
        with self.context():
            output = forward(*args, **kwargs)
        return convert_to_fp32(output)


class AutocastForward:
    """A forward under autocast that is no method of its module; a class, so that it pickles where the forward does."""

    def __init__(self, forward: Callable, autocast: Autocast) -> None:
        # Signature probes (inspect.signature follows __wrapped__) see the model's own parameters.
        functools.update_wrapper(self, forward)
        self.autocast = autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward and return its output, floating-point tensors as float32."""
        return self.autocast.run(self.__wrapped__, *args, **kwargs)


def _function(forward: Callable, autocast: Autocast) -> Any:
    """Return a function that calls a method's function under autocast."""

    @functools.wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        return autocast.run(forward, *args, **kwargs)

    autocast_forward.autocast = autocast  # type: ignore[attr-defined]
    return autocast_forward


# All functions of `_function` share it. Their attributes are no sign, because wrappers of other libraries copy those.
_CODE = _function(nn.Module.forward, Autocast("cpu", precision("no"))).__code__


def autocast_of(forward: Any) -> Autocast | None:
    """Return the autocast of a forward that ``wrap_forward`` made; else None."""
    ours = isinstance(forward, AutocastForward) or getattr(forward, "__code__", None) is _CODE
    return forward.autocast if ours else None


class _Again:
    """The pickled form of a model's autocast: pickle reads a bound method back as the method of that name of the class."""

    def __init__(self, model: nn.Module, autocast: Autocast) -> None:
        self.model = model
        self.autocast = autocast

    def __reduce__(self) -> tuple[Any, ...]:
        return _wrapped_again, (self.model, self.autocast)


def _wrapped_again(model: nn.Module, autocast: Autocast) -> _Again:
    """Wrap the forward of a model that is being unpickled, and has no attributes yet."""
    again, forward = _Again(model, autocast), types.MethodType(_function(type(model).forward, autocast), model)
    # In the order of `wrap_forward`, for the next pickle.
    model.__dict__.update({"_original_forward": model.forward, AUTOCAST: again, "forward": forward})
    return again


def wrap_forward(model: nn.Module, device_type: str, row: Precision, handler: AutocastKwargs | None = None) -> None:
    """Make a model's forward run under autocast and return float32, in place and at most once.

    The new forward is a method of the model, if the original is. That one is kept as ``model._original_forward``,
    where ``unwrap_model(keep_fp32_wrapper=False)`` finds it. A precision that casts nothing takes off an earlier
    wrapper.
    """
    unwrap_forward(model)  # a deep copy, or a run in another precision, brings the earlier wrapper along
    if row.autocast_dtype is None:
        return
    autocast, original, attributes = Autocast(device_type, row, handler), model.forward, model.__dict__
    attributes.pop("forward", None)
    # In this order: a pickle is read in it, and `forward` finds what `AUTOCAST` has wrapped again.
    attributes["_original_forward"] = original
    if isinstance(original, types.MethodType) and original.__self__ is model:
        attributes[AUTOCAST] = _Again(model, autocast)
        attributes["forward"] = types.MethodType(_function(original.__func__, autocast), model)
    else:
        attributes["forward"] = AutocastForward(original, autocast)


def unwrap_forward(model: nn.Module) -> None:
    """Give a model its original forward back, if ``wrap_forward`` replaced it."""
    if autocast_of(model.__dict__.get("forward")) is not None:
        restore_forward(model)


def make_scaler(device_type: str, row: Precision, handler: GradScalerKwargs | None = None) -> GradScaler | None:
    """Return the gradient scaler of a precision, or None when the loss is not scaled."""
    if not row.scales_loss:
        return None
    return GradScaler(device_type, **(handler.to_kwargs() if handler is not None else {}))


def remember(model: nn.Module) -> None:
    """Note once, as ``model._accelerate_loaded``, which dtypes tensors came to ``prepare`` with. Not a collective."""
    if "_accelerate_loaded" not in model.__dict__:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        model._accelerate_loaded = {name: tensor.dtype for name, tensor in tensors}  # type: ignore[assignment]


def check_weights(model: nn.Module, scaler: Any | None) -> None:
    """Raise a ValueError for a trainable float16 parameter while gradients are scaled, before the first step."""
    if scaler is None or not scaler.is_enabled():
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"The parameter {name!r} is torch.float16, but mixed_precision='fp16' scales gradients and a scaler "
                "cannot unscale float16 gradients. Load the model in float32 (`model.float()`: autocast still computes "
                "in float16), or train it in bfloat16 with mixed_precision='bf16'."
            )
