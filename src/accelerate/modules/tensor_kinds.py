"""Kinds of tensors that torch's state dicts omit, or that checkpoints keep in another form. `Spec.tensor_kinds` of extensions names them."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from accelerate.extension import all_specs, imported


class TensorKind:
    """One kind; the defaults are those of ordinary tensors. No method is a collective."""

    def of_model(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return tensors of a model that are neither parameters nor buffers, by name."""
        return {}

    def is_kept_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the state of an optimizer has tensors of this kind."""
        return False

    def plain(self, value: Any) -> Any:
        """Return the checkpoint's form of a value of an optimizer's state: the value, or a dict of its parts."""
        return value

    def is_parts(self, value: Any) -> bool:
        """Return whether a stored value is a dict of parts of this kind."""
        return False

    def rebuilt(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an optimizer's stored state, with values of this kind where the optimizer keeps them."""
        return state


@cache
def kinds() -> tuple[TensorKind, ...]:
    """Return one instance of each kind."""
    return tuple(imported(address)() for spec in all_specs() for address in spec.tensor_kinds)


def of_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that are neither parameters nor buffers, by name."""
    return {name: tensor for kind in kinds() for name, tensor in kind.of_model(model).items()}


def kept_by(optimizer: torch.optim.Optimizer) -> list[TensorKind]:
    """Return the kinds that the state of an optimizer has tensors of."""
    return [kind for kind in kinds() if kind.is_kept_by(optimizer)]


def is_parts(value: Any) -> bool:
    """Return whether a stored value is a dict of parts of a tensor."""
    return any(kind.is_parts(value) for kind in kinds())


def rebuilt(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's stored state as its `load_state_dict` takes it."""
    for kind in kinds():
        state = kind.rebuilt(optimizer, state)
    return state
