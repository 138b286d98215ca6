"""The tensors of a model: their names, those that several names share, and the bytes that they, modules and layers take."""

import logging
import sys
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.base.nested import leaves
from accelerate.config.enums import CustomDtype
from accelerate.modules.optimizer_remap import ties

logger = logging.getLogger("accelerate.utils.modeling")

# How many groups of tied parameters a warning spells out.
_SHOWN = 5
_CUSTOM_BYTES = {"fp8": 1, "int4": 1 / 2, "int2": 1 / 4}


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a module keeps out of its state dict. The module is only read.

    Args:
        module: The module to look into.
        recurse: Also look into its submodules.
        fqns: With ``recurse``, return names as ``named_buffers`` writes them (``"block.mask"``); otherwise only the
            last part, without saying in which submodule.

    Example:
        >>> block = nn.Module()
        >>> block.register_buffer("mask", torch.ones(2), persistent=False)
        >>> get_non_persistent_buffers(nn.Sequential(block), recurse=True, fqns=True)
        {'0.mask'}
    """
    searched = module.named_modules() if recurse else [("", module)]
    found = ((path, name) for path, part in searched for name in part._non_persistent_buffers_set)
    return {f"{path}.{name}" if fqns and path else name for path, name in found}


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module and then its buffers, with their names.

    Args:
        module: The module to read.
        include_buffers: Yield buffers as well.
        recurse: Include the tensors of submodules; a tensor reached twice comes once.
        remove_non_persistent: Omit buffers that are not in the state dict.

    Example:
        >>> [name for name, _ in named_module_tensors(nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    if not recurse or not module._modules:
        # Hooks ask this of every module of a model; the general way below costs ten times as much.
        yield from _direct(module._parameters)
        left_out = module._non_persistent_buffers_set if remove_non_persistent else ()
        if include_buffers:
            yield from (pair for pair in _direct(module._buffers) if pair[0] not in left_out)
        return
    yield from module.named_parameters(recurse=True)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse=True, fqns=True) if remove_non_persistent else ()
        for name, buffer in module.named_buffers(recurse=True):
            if name not in left_out:
                yield name, buffer


def _direct(table: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one module's table; one that has two names comes once."""
    seen: set[int] = set()
    # A list, because who iterates replaces tensors meanwhile.
    return [(name, t) for name, t in table.items() if t is not None and not (id(t) in seen or seen.add(id(t)))]


def tensor_at(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a tensor and the tensor's name in it; AttributeError: no such module."""
    path, _, last = name.rpartition(".")
    return (module.get_submodule(path) if path else module), last


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
    return [sorted(names) for _, names in ties(model)]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group refer to one parameter again, the first of them that holds data.

    A group whose parameters are all on the meta device stays as it is: there is nothing yet to share.

    Args:
        model: The model, changed in place.
        tied_params: Groups of names, as `find_tied_parameters` returned them.

    Raises:
        AttributeError: A name does not exist in the model.

    Example:
        >>> from accelerate.utils import retie_parameters
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> retie_parameters(model, [["0.weight", "1.weight"]])
        >>> model[0].weight is model[1].weight
        True
    """
    for group in tied_params:
        owners = [tensor_at(model, name) for name in group]
        parameters = [getattr(owner, last) for owner, last in owners]
        shared = next((p for p in parameters if p.device.type != "meta"), None)
        if shared is not None:
            for owner, last in owners:
                setattr(owner, last, shared)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a transformers model declares tied weights, in its configuration or by a ``_tie_weights`` method.

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


def entry_of(name: str, entries: Container[str]) -> str | None:
    """Return the longest entry of a device map that a tensor or module lies under; ``""`` is everything; None if none."""
    while name not in entries:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device that the longest entry a tensor or module lies under gives to it; ValueError if none."""
    entry = entry_of(name, device_map)
    if entry is None:
        raise ValueError(f"The `device_map` gives no device for {name!r}. Add it, a parent module, or '' (the rest).")
    return device_map[entry]


def _get_param_device(param: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device that a map gives to a parameter; raises as `device_of`."""
    return device_of(param, device_map)


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn, once, where a device map puts the names of a tied parameter on several devices, which duplicates it.

    Args:
        tied_params: As `find_tied_parameters` returns it.
        device_map: Module names to devices.

    Raises:
        ValueError: The map does not cover a tied parameter.

    Example:
        >>> from accelerate.utils import check_tied_parameters_on_same_device
        >>> check_tied_parameters_on_same_device([["embedding.weight", "head.weight"]], {"": "cpu"})  # warns where they are not
    """
    placed = [{name: device_of(name, device_map) for name in group} for group in tied_params]
    separated = [str(group) for group in placed if len(set(group.values())) > 1]
    if separated:
        logger.warning(
            "Tied parameters are on different devices: %s. Each device gets a separate copy; put these modules on one device, "
            "or use `device_map='auto'`.",
            listed(separated, _SHOWN),
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
        modules_to_treat: The modules not yet placed. A tied parameter in none of them is omitted.

    Returns:
        The bytes of all of them, the names of the tied modules and the modules themselves.
    """
    total = module_size
    order = {name: index for index, (name, _) in reversed(list(enumerate(modules_to_treat)))}
    found: dict[str, nn.Module | torch.Tensor] = {}
    for parameter in tied_params:
        holders = [order[part] for part in name_and_parents(parameter) if part in order]
        if not holders:
            continue
        name, module = modules_to_treat[min(holders)]
        if name not in found:
            found[name] = module
            # The shared parameter itself is in one of the two sizes already, or in both.
            total += module_sizes.get(name, 0) - module_sizes.get(parameter, 0)
    return total, list(found), list(found.values())


def name_and_parents(name: str) -> Iterator[str]:
    """Yield a dotted name, then those of the modules that it is in, innermost first; nothing for an empty one."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def dtype_byte_size(dtype: torch.dtype | CustomDtype | str) -> int | float:
    """Return the bytes that one element of a dtype takes; less than 1 for packed dtypes.

    Args:
        dtype: A torch dtype, its name, or a `CustomDtype` of a quantised model. ``torch.bool`` counts as one bit,
            which is what quantised formats pack it to.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> dtype_byte_size(torch.bfloat16)
        2
    """
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype.value]
    plain = _get_proper_dtype(dtype)
    if plain is torch.bool:
        return 1 / 8
    if not isinstance(plain, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a torch.dtype, the name of one, or a CustomDtype.")
    return plain.itemsize


def _get_proper_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype given by name (``"float16"``, ``"torch.float16"``) as the torch dtype; anything else unchanged.

    Raises:
        ValueError: torch has no dtype of that name.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={dtype!r} names no torch dtype. Use a name such as 'float16' or 'bfloat16'.")
    return found


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every tensor of a model and of every module that holds some.

    Tied parameters count once, under the name that comes first.

    Args:
        model: The model; its tensors may be on the meta device.
        dtype: Count as if floating-point tensors were cast to this dtype, where that makes them smaller.
        special_dtypes: Exact dtypes for some tensors, by full name. Names that the model does not have are allowed.
        buffers_only: Leave the parameters out.

    Returns:
        Full name to bytes; ``""`` is the whole model. Names without tensors answer 0.

    Raises:
        ValueError: A dtype is none.

    Example:
        >>> compute_module_sizes(nn.Linear(3, 4))["weight"]
        48
    """
    most = float("inf") if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(of_one) for name, of_one in (special_dtypes or {}).items()}
    tensors: Iterable[tuple[str, torch.Tensor]]
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: dict[str, int] = defaultdict(int)
    each: dict[torch.dtype, int | float] = {}
    for name, tensor in tensors:
        own = tensor.dtype
        if own not in each:
            casts = own.is_floating_point or own.is_complex
            each[own] = min(dtype_byte_size(own), most if casts else float("inf"))  # a cast never enlarges them
        size = tensor.numel() * special.get(name, each[own])
        for part in ("", *reversed(list(name_and_parents(name)))):
            sizes[part] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> int:
    """Return the bytes of all buffers of a model; the arguments are those of `compute_module_sizes`."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that no other name in the mapping lies right below; the whole model, ``""``, is never one of
    them.

    Args:
        module_sizes: As `compute_module_sizes` returns it, or a part of it.
    """
    inner = {"", *(name.rpartition(".")[0] for name in module_sizes)}
    return [name for name in module_sizes if name not in inner]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | str | None,
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer, that is, of the largest unit that has to be on a device at once.

    Args:
        modules: Names with modules, parameters or buffers, as the queue of `infer_auto_device_map` holds them.
        module_sizes: As `compute_module_sizes` returns it.
        no_split_module_classes: Names of classes that count as one layer although they have children.

    Returns:
        The size in bytes, and the names of all layers that have it.

    Example:
        >>> from accelerate.utils import compute_module_sizes, get_max_layer_size
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4))
        >>> get_max_layer_size(list(model.named_children()), compute_module_sizes(model), [])
        (48, ['1'])
    """
    whole = class_names(no_split_module_classes)
    layers: dict[str, int] = {}
    pending = list(modules)[::-1]
    while pending:
        name, item = pending.pop()
        if is_whole(item, whole):
            layers[name] = module_sizes.get(name, 0)
        else:
            prefix = f"{name}." if name else ""
            pending += [(prefix + child_name, child) for child_name, child in reversed(list(item.named_children()))]
    largest = max(layers.values(), default=0)
    return largest, [name for name, size in layers.items() if size == largest]


def class_names(classes: Iterable[str | type] | str | None) -> set[str]:
    """Return `no_split_module_classes`, classes or their names or one of either, as a set of names; else ValueError."""
    given = [classes] if isinstance(classes, str | type) or not isinstance(classes, Iterable) else list(classes)
    found = [] if classes is None else given
    wrong = [entry for entry in found if not isinstance(entry, str | type)]
    if wrong:
        raise ValueError(
            f"no_split_module_classes holds {wrong[0]!r}, which is no class name. Give names such as ['Block']."
        )
    return {entry.__name__ if isinstance(entry, type) else entry for entry in found}


def is_whole(item: nn.Module | torch.Tensor, no_split: Collection[str]) -> bool:
    """Return whether an item is never split: a tensor, a module without submodules, or one of some classes."""
    return not isinstance(item, nn.Module) or type(item).__name__ in no_split or next(item.children(), None) is None


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names for a message: the first few, and how many more there are ("a, b and 1 more")."""
    found = list(names)
    shown = ", ".join(found[:most])
    return f"{shown} and {len(found) - most} more" if len(found) > most else shown


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a whole model and of its largest layer.

    Args:
        model: The model; classes in its ``_no_split_modules`` (transformers) count as one layer.

    Returns:
        ``(total, (largest, names of the layers that are that large))``.
    """
    sizes = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None)
    direct = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes.get("", 0), get_max_layer_size(direct, sizes, whole)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested structure, or None if it has none.

    Example:
        >>> from accelerate.utils import find_device
        >>> find_device({"ids": torch.arange(2)})
        device(type='cpu')
    """
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)
