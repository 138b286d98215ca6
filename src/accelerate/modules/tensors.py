"""Questions about tensors and their storage, and state dicts made fit for safetensors."""

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies the memory of a tensor: device, address and size in bytes of its storage.

    Two tensors with equal results share memory. Tensors without memory (meta) or without an address (some wrappers,
    such as DTensor) are told apart by identity.

    Args:
        tensor: Any tensor.

    Example:
        >>> base = torch.zeros(4)
        >>> id_tensor_storage(base) == id_tensor_storage(base[2:])
        True
    """
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        address, size = 0, 0
    if address == 0:
        return tensor.device, id(tensor), tensor.numel() * tensor.element_size()
    return tensor.device, address, size


def shared_tensor_names(state_dict: Mapping[str, Any]) -> list[list[str]]:
    """Return the groups of two or more names whose tensors share memory, in the order of the dict.

    Args:
        state_dict: Names and values; values that are no tensors are left out.
    """
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            groups[id_tensor_storage(value)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def same_tensors(state: Mapping[str, Any]) -> dict[str, str]:
    """Return names whose tensor is that of an earlier name, and that name. Tensors that only overlap are different data.

    Args:
        state: Names and values.
    """
    found = {}
    for names in shared_tensor_names(state):
        first: dict[Any, str] = {}
        for name in names:
            kept = first.setdefault(_view(state[name]), name)
            if kept != name:
                found[name] = kept
    return found


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that safetensors can write: each tensor once, contiguous, and sharing memory with no other.

    Of several names for one and the same tensor (tied weights) the first in the dict stays; loading a model ties the
    others again. Tensors that only overlap in memory are different data, so each of them is kept, as a copy.

    Args:
        state_dict: Names and tensors. It stays as it is.

    Raises:
        ValueError: A value is not a tensor; the message names it.

    Source:
        https://huggingface.co/docs/safetensors/torch_shared_tensors
    """
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"safetensors holds tensors only, but the entry {name!r} of the state dict is a {type(value).__name__}. "
                "Save with safe_serialization=False to keep it."
            )
    cleaned = dict(state_dict)
    dropped = []
    for names in shared_tensor_names(state_dict):
        kept: set[tuple[Any, ...]] = set()
        for name in names:
            view = _view(state_dict[name])
            if view in kept:
                del cleaned[name]
                dropped.append(name)
            else:
                if kept:
                    cleaned[name] = state_dict[name].clone()
                kept.add(view)
    if dropped:
        logger.debug("Tied tensors are saved under their first name only; left out: %s.", ", ".join(dropped))
    return {name: value.contiguous() for name, value in cleaned.items()}


def model_has_dtensor(model: nn.Module) -> bool:
    """Say whether any parameter of a model is a DTensor, that is, spread over a device mesh.

    Args:
        model: Any module.

    Source:
        https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """
    # While the module is not imported there is no such tensor, and importing it is slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many devices a model's tensors were split when it was loaded, or None when they were not.

    Args:
        model: A model; transformers sets ``tp_size`` on those loaded with ``tp_plan``, or in the ``distributed_config``
            of their configuration, which may be a dict.
    """
    if hasattr(model, "tp_size"):
        return model.tp_size
    split = getattr(getattr(model, "config", None), "distributed_config", None)
    return split.get("tp_size") if isinstance(split, Mapping) else getattr(split, "tp_size", None)
