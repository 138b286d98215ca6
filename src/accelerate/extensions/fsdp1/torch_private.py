"""Torch's private names that this extension alone uses; see `runtime.torch_private`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


def member_names(parameter: nn.Parameter | None) -> Sequence[str] | None:
    """Return the names, below its module, of the parameters in a flat one; None for any other."""
    return getattr(parameter, "_fqns", None)


def shared_members(module: nn.Module) -> Sequence[Any]:
    """Return torch's records of the parameters that share memory with another in the flat one of a module."""
    return getattr(getattr(module, "_flat_param", None), "_shared_param_infos", ())


def buffer_dtypes(wrapper: nn.Module) -> Mapping[str, torch.dtype]:
    """Return the dtypes of a model's buffers before mixed precision, by their names, if FSDP1 wraps the model."""
    return getattr(wrapper, "_buffer_name_to_orig_dtype", {})
