"""Creating modules directly on a device, above all on the meta device, where they take no memory."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from accelerate.utils.environment import parse_flag_from_env


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Have the parameters of modules made inside live on the meta device, so that a model larger than memory can be made.

    Works as a ``with`` block and as a decorator. Such a model has shapes and dtypes, but no data: load a checkpoint with
    `load_checkpoint_and_dispatch` before using it.

    Args:
        include_buffers: Put buffers on the meta device too, and every other tensor made inside. None: as
            ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else no.

    Example:
        >>> with init_empty_weights():
        ...     layer = nn.Linear(1000, 1000)
        >>> layer.weight.device.type
        'meta'
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Have the parameters of modules made inside live on a device. Works as a ``with`` block and as a decorator.

    Args:
        device: The device.
        include_buffers: Put buffers there too, and every other tensor made inside. None: as
            ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else no.

    Example:
        >>> @init_on_device("meta")
        ... def build():
        ...     return nn.Linear(2, 2)
        >>> build().weight.device.type
        'meta'
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    if include_buffers:
        # torch makes every tensor there; no memory is ever taken elsewhere.
        with torch.device(device):
            yield
        return
    register = nn.Module.register_parameter

    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            module._parameters[name] = _parameter_on(param, torch.device(device))

    nn.Module.register_parameter = register_on_device
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _parameter_on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.device == device:
        return parameter
    # Out of the meta device there is nothing to copy: such a parameter is still to be initialised.
    made = (
        torch.empty_like(parameter, device=device)
        if parameter.device.type == "meta"
        else parameter.detach().to(device)
    )
    if type(parameter) is nn.Parameter or not issubclass(type(parameter), nn.Parameter):
        new = nn.Parameter(made, requires_grad=parameter.requires_grad)
    else:
        new = torch.Tensor._make_subclass(type(parameter), made, parameter.requires_grad)
    new.__dict__.update(getattr(parameter, "__dict__", {}))
    return new
