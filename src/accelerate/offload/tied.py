"""Tied parameters: finding them, tying them again, and what they weigh together."""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.offload.tensors import tensor_at

logger = logging.getLogger("accelerate.utils.modeling")


def is_peft_model(model: nn.Module) -> bool:
    """Say whether a model, taken out of its parallel wrappers, is a ``PeftModel``. Does not import peft.

    Args:
        model: Any module.
    """
    # Where peft was never imported nobody can have made a PeftModel.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names under which one and the same parameter is reachable.

    Call it before weights move between devices: a move makes a new parameter out of each name.

    Args:
        model: The model to search.
        **kwargs: Accepted for callers of older versions; has no effect.

    Returns:
        Groups of two or more names, each sorted; groups in the order of ``model.named_parameters()``.

    Example:
        >>> model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        >>> model["b"].weight = model["a"].weight
        >>> find_tied_parameters(model)
        [['a.weight', 'b.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group refer to one parameter again, the first of them that holds data.

    A group whose parameters are all on the meta device stays as it is: there is nothing yet to share.

    Args:
        model: The model, changed in place.
        tied_params: Groups of names, as `find_tied_parameters` returned them.

    Raises:
        AttributeError: A name does not exist in the model.
    """
    for group in tied_params:
        owners = [tensor_at(model, name) for name in group]
        parameters = [getattr(owner, last) for owner, last in owners]
        shared = next((p for p in parameters if p.device.type != "meta"), None)
        if shared is not None:
            for owner, last in owners:
                setattr(owner, last, shared)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Say whether a transformers model declares tied weights, in its configuration or by a ``_tie_weights`` method.

    Args:
        model: Any module; other libraries' models declare nothing and give False.
    """
    # A model can only be a PreTrainedModel if that class was imported; importing it here would take seconds.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return False
    config = getattr(model, "config", None)
    if config is not None:
        words = getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
        if words and model.get_output_embeddings() is not None:
            return True
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
            return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device that a device map gives to a parameter: that of the longest entry it lies under.

    Args:
        name: Dotted name of a parameter, buffer or module.
        device_map: Module or tensor names to devices; ``""`` stands for everything.

    Raises:
        ValueError: No entry covers the name.
    """
    part = name
    while part not in device_map:
        if not part:
            raise ValueError(
                f"The `device_map` gives no device for {name!r}. Add it, a parent module, or '' (the rest)."
            )
        part = part.rpartition(".")[0]
    return device_map[part]


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn where a device map puts the names of one tied parameter on several devices, which duplicates it.

    Args:
        tied_params: As `find_tied_parameters` returns it.
        device_map: Module names to devices.

    Raises:
        ValueError: The map does not cover a tied parameter.
    """
    for group in tied_params:
        placed = {name: device_of(name, device_map) for name in group}
        if len(set(placed.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. Each device gets a copy of its own; put these modules on "
                "one device, or use `device_map='auto'`.",
                placed,
            )


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module | torch.Tensor]],
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    """Return what a module weighs together with the waiting modules that its parameters are tied to.

    Args:
        tied_params: Names of parameters outside the module that are tied to parameters inside it.
        module_size: Bytes of the module.
        module_sizes: As `compute_module_sizes` returns it; a tied parameter counts in it only once.
        modules_to_treat: The modules not yet placed. A tied parameter in none of them is left out.

    Returns:
        The bytes of all of them, the names of the tied modules and the modules themselves.
    """
    total, names, modules = module_size, [], []
    for parameter in tied_params:
        for name, module in modules_to_treat:
            if parameter == name or parameter.startswith(f"{name}."):
                if name not in names:
                    names.append(name)
                    modules.append(module)
                    # The shared parameter itself is in one of the two sizes already, or in both.
                    total += module_sizes.get(name, 0) - module_sizes.get(parameter, 0)
                break
    return total, names, modules
