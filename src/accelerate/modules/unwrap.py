"""The wrappers around models, and the names of their tensors."""

import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.config.strategies import wrappers

logger = logging.getLogger(__name__)

# Attribute of a module in which mixed precision keeps the pickled description of its forward.
AUTOCAST = "_accelerate_autocast"

# Attribute of a module compiled by regions that holds the original module. It is not a registered submodule, so that
# parameters are not listed twice.
ORIGINAL = "_orig_mod"

# The attribute under which each kind of wrapper keeps the module inside it, at whatever depth.
INNER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_module")


def loaded_wrappers() -> tuple[type, ...]:
    """Return the classes of `config.strategies.wrappers` that are imported: what training wraps a model in.

    A class that was not imported wraps nothing, and importing it (DeepSpeed's, say) would take seconds.

    Not a collective.
    """
    loaded = sys.modules.get
    return tuple([kind for path, name in wrappers() if isinstance(kind := getattr(loaded(path), name, None), type)])


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is the wrapper that ``torch.compile`` returns.

    A module compiled in place with ``module.compile()`` is no wrapper, and neither is one compiled by regions.

    Args:
        module: Any module.

    Example:
        >>> is_compiled_module(nn.Linear(2, 2))
        False
    """
    # Asking for torch._dynamo imports it, which takes seconds; while it is not loaded nothing can be compiled.
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return frame is not None and isinstance(module, frame.OptimizedModule)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model without the wrappers that training put around it; the model itself if there are none.

    Not a collective.

    Args:
        model: A model, wrapped or not.
        keep_fp32_wrapper: Keep the forward of mixed precision (autocast, float32 outputs). False restores the module's
            own forward, in place.
        keep_torch_compile: Return the compiled model, if it is compiled; False returns the module that was compiled.
        recursive: Also remove the wrappers of the model's submodules, in place.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 2)
        >>> extract_model_from_parallel(torch.nn.DataParallel(net)) is net
        True
    """
    wrappers = loaded_wrappers()
    inner, compiled = _peeled(model, wrappers)
    if recursive:
        _unwrap_children(inner, wrappers)
    if not keep_fp32_wrapper:
        restore_forward(inner)
    if not keep_torch_compile:
        original = inner.__dict__.get(ORIGINAL)
        return inner if original is None else original
    return _compiled_like(compiled, inner)


def _peeled(module: nn.Module, wrappers: tuple[type, ...]) -> tuple[nn.Module, Any]:
    """The module inside all wrappers and compiled ones, and the innermost of the compiled ones."""
    compiled = None
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif is_compiled_module(module):
            compiled, module = module, module._orig_mod
        else:
            return module, compiled


def _compiled_like(compiled: Any, inner: nn.Module) -> nn.Module:
    """The inner module compiled as it was together with its wrappers; itself where nothing was compiled."""
    if compiled is None:
        return inner
    if compiled._orig_mod is inner:
        return compiled
    # A parallel wrapper was compiled together with the model. The wrapper in use must not change, so the inner
    # module gets a separate compiled module, with the same compiler context.
    return type(compiled)(inner, compiled.dynamo_ctx)


def _unwrap_children(module: nn.Module, wrappers: tuple[type, ...]) -> None:
    for name, child in module._modules.items():
        if child is not None:
            inner, compiled = _peeled(child, wrappers)
            _unwrap_children(inner, wrappers)
            module._modules[name] = _compiled_like(compiled, inner)


def restore_forward(module: nn.Module) -> None:
    """Undo the forward that mixed precision put on an unwrapped module, if it did."""
    attributes: dict[str, Any] = module.__dict__
    attributes.pop(AUTOCAST, None)
    original: Callable | None = attributes.pop("_original_forward", None)
    if original is None:
        return
    attributes.pop("forward", None)
    # A forward that was on the instance before (a hook's, a patch) goes back there; a class's own needs no entry.
    if getattr(original, "__func__", None) is not getattr(type(module), "forward", None):
        attributes["forward"] = original


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """Return a model's submodules, each one after all of its children, and the model itself last.

    A module that is registered twice is listed twice, under each of its names.

    Args:
        model: The root module.
        return_fqns: Return pairs of dotted name and module; the root's name is ``""``.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Tanh()))
        >>> [name for name, _ in get_module_children_bottom_up(net, return_fqns=True)]
        ['0', '1.0', '1', '']
    """
    pairs = []
    for name, child in model._modules.items():
        if child is not None:
            inner = get_module_children_bottom_up(child, return_fqns=True)
            pairs += [(f"{name}.{path}" if path else name, part) for path, part in inner]
    pairs.append(("", model))
    return pairs if return_fqns else [module for _, module in pairs]


# Names of parameters ---------------------------------------------------------------------------------------------------


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile, FSDP1 and activation checkpointing put in.

    The leading ``module.`` of DistributedDataParallel stays, because a user's own attribute may have that name.
    """
    return ".".join(itertools.filterfalse(INNER_ATTRIBUTES.__contains__, name.split(".")))


def canonical_names(names: Iterable[str]) -> list[str]:
    """Return `canonical_name` of each of some names."""
    return [".".join(itertools.filterfalse(INNER_ATTRIBUTES.__contains__, name.split("."))) for name in names]


def match_names(targets: Iterable[str], source_names: Iterable[str]) -> dict[str, str]:
    """Map each found name to the wanted one of the same parameter, whatever wrappers wrote the names.

    Equal names pair first; the others when, without wrapper parts and a leading ``module.``, they are equal and
    unambiguous.
    """
    target_names, source_names = set(targets), list(source_names)
    pairs = {name: name for name in source_names if name in target_names}
    if len(pairs) == len(source_names):
        return pairs
    partners = _by_bare_name(target_names.difference(pairs))
    for bare, names in _by_bare_name(name for name in source_names if name not in pairs).items():
        if len(names) == len(partners.get(bare, ())) == 1:
            pairs[names[0]] = partners[bare][0]
    return pairs


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    names = list(names)
    for name, bare in zip(names, canonical_names(names), strict=True):
        groups[bare.removeprefix("module.")].append(name)
    return groups


# Tensors ---------------------------------------------------------------------------------------------------------------


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies the memory of a tensor: device, address and size in bytes of its storage.

    Two tensors with equal results share memory. Tensors without memory (meta) or without an address (some wrappers,
    such as DTensor) are distinguished by identity.

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
    """Return the groups of two or more names whose tensors share memory, in the order of the dict."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            groups[id_tensor_storage(value)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def same_tensors(state: Mapping[str, Any], groups: Iterable[list[str]]) -> dict[str, str]:
    """Return names whose tensor is that of an earlier name of their group, with that name; mere overlap makes different data."""
    duplicates = {}
    for names in groups:
        first: dict[Any, str] = {}
        for name in names:
            tensor = state[name]
            views = tensor.is_conj(), tensor.is_neg()
            kept = first.setdefault(
                (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), views), name
            )
            if kept != name:
                duplicates[name] = kept
    return duplicates


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that safetensors can write: contiguous tensors, each once, without shared memory.

    Of several names for one tensor (tied weights) the first in the dict stays; loading a model ties the others again.
    Tensors that only overlap in memory are different data, so each of them is copied.

    Args:
        state_dict: Names and tensors. It is not changed.

    Raises:
        ValueError: A value is not a tensor; the message names it.

    Example:
        >>> from accelerate.utils import clean_state_dict_for_safetensors
        >>> weight = torch.ones(2)
        >>> list(clean_state_dict_for_safetensors({"embedding": weight, "head": weight}))  # tied ones once
        ['embedding']

    Source:
        https://huggingface.co/docs/safetensors/torch_shared_tensors
    """
    return separate_tensors(state_dict)[0]


def separate_tensors(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what `clean_state_dict_for_safetensors` returns, and each name that it lacks with the name of the same tensor."""
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"safetensors holds tensors only, but the entry {name!r} of the state dict is a {type(value).__name__}. "
                "Save with safe_serialization=False to keep it."
            )
    groups = shared_tensor_names(state_dict)
    tied = same_tensors(state_dict, groups)
    if tied:
        logger.debug("Tied tensors are saved under their first name only; skipped: %s.", ", ".join(tied))
    tensors = {name: value.contiguous() for name, value in state_dict.items() if name not in tied}
    for names in groups:
        for name in [name for name in names if name not in tied][1:]:  # it overlaps with the first one
            tensors[name] = state_dict[name].clone().contiguous()
    return tensors, tied


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether any parameter of a model is a DTensor, that is, spread over a device mesh.

    Args:
        model: Any module.

    Example:
        >>> from accelerate.utils import model_has_dtensor
        >>> model_has_dtensor(torch.nn.Linear(1, 1))
        False

    Source:
        https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """
    # While the module is not imported there is no such tensor, and importing it is slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, model.parameters())))


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, taken out of its parallel wrappers, is a ``PeftModel``. Does not import peft.

    Args:
        model: Any module.

    Example:
        >>> import torch
        >>> from accelerate.utils import is_peft_model
        >>> is_peft_model(torch.nn.Linear(1, 1))
        False
    """
    # If peft was never imported, there is no PeftModel.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)
