"""Compilation of models, the wrappers around them, and the names of their tensors.

A model of many equal blocks compiles much faster if one block is compiled and its code reused for the others. See
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html.
"""

import functools
import itertools
import logging
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.config.strategies import wrappers
from accelerate.runtime import torch_private

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


# Compilation by regions ------------------------------------------------------------------------------------------------


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module, or anything inside it, is a ``torch.compile`` wrapper.

    Args:
        module: Any module.

    Example:
        >>> from accelerate.utils import has_compiled_regions
        >>> has_compiled_regions(torch.nn.Linear(1, 1))
        False
    """
    return "torch._dynamo.eval_frame" in sys.modules and any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks of one class, such as the layers of a transformer.

    Args:
        module: Any module.
    """
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and len({type(block) for block in module.children()}) == 1
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is, or contains at any depth, a list of blocks of one class.

    Args:
        module: Any module.
    """
    return any(is_repeated_blocks(part) for part in module.modules())


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


def _is_region(module: nn.Module) -> bool:
    """Return whether a module is compiled as one piece: no mere container, and without repeated blocks inside."""
    called = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    return called and not has_repeated_blocks(module)


def _twin(module: nn.Module) -> nn.Module:
    """Return a module of the same class that shares parameters, buffers and hooks, with its own dict of children."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules=dict(module._modules))
    for name, value in module.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            twin.__dict__[name] = types.MethodType(value.__func__, twin)
    return twin


# The tables of every module. A twin gets their entries, or is the argument of the entries.
_TABLES = vars(nn.Module()).keys()


def _needs_identity(module: nn.Module) -> bool:
    """Return whether a module calls itself or its parts through something that a twin cannot replace.

    Such are the forward of a hook, a closure around the former forward, and a list of submodules.
    """
    if getattr(module.forward, "__self__", None) is not module:
        return True
    parts, seen = set(map(id, module.modules())), set()
    values = [value for name, value in vars(module).items() if name not in _TABLES]
    # A twin's methods are bound to the twin, so only their functions count.
    pending = [value.__func__ if getattr(value, "__self__", None) is module else value for value in values]
    while pending:
        value = pending.pop()
        if id(value) in parts:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            pending += references(value)
    return False


def references(value: Any) -> Iterable[Any]:
    """Return the objects that a container or a callable refers to directly."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, Set)):
        return value
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return *cells, *(value.__defaults__ or ())
    if callable(value) and not isinstance(value, (type, nn.Module)):
        return getattr(value, "__dict__", {}).values()
    return ()


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a module whose regions are compiled, its parameters shared with the one given, which stays as it is.

    Each block of a list of equal blocks is a region, so that its code is compiled once; elsewhere the largest modules
    without such a list inside are regions. The modules above the regions stay uncompiled.

    Regions below a module whose ``forward`` was replaced (a hook, a closure) are compiled in place, because that
    forward calls the original modules.

    Args:
        module: The module to compile.
        **compile_kwargs: Passed to ``torch.compile``.

    Example:
        >>> net = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.ReLU()])})
        >>> compiled = compile_regions(net, backend="eager")
        >>> is_compiled_module(compiled), is_compiled_module(compiled["blocks"][0]), is_compiled_module(net["blocks"][0])
        (False, True, False)
    """
    compiled_parts: dict[int, nn.Module] = {}  # a module registered twice must stay one module

    def in_place(part: nn.Module) -> None:
        if part._compiled_call_impl is None:
            part.compile(**compile_kwargs)

    def compiled(part: nn.Module, whole: bool) -> nn.Module:
        if id(part) not in compiled_parts:
            if is_compiled_module(part):
                compiled_parts[id(part)] = part
            elif whole or _is_region(part):
                compiled_parts[id(part)] = torch.compile(part, **compile_kwargs)
            elif not part._modules:
                compiled_parts[id(part)] = part
            elif _needs_identity(part):
                _compile_regions(part, in_place)
                compiled_parts.update((id(inner), inner) for inner in part.modules())
            else:
                twin = compiled_parts[id(part)] = _twin(part)
                twin.__dict__[ORIGINAL] = part
                blocks = is_repeated_blocks(part)
                for name, child in part._modules.items():
                    if child is not None:
                        twin._modules[name] = compiled(child, whole=blocks)
        return compiled_parts[id(part)]

    return compiled(module, whole=False)


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile a module's regions in place, as DeepSpeed needs it: its engine holds the modules themselves.

    Args:
        module: The module to compile; see ``compile_regions`` for the regions.
        **compile_kwargs: Passed to ``Module.compile``.
    """
    _compile_regions(module, lambda part: part.compile(**compile_kwargs))


def _compile_regions(
    module: nn.Module,
    compile_one: Callable[[nn.Module], Any],
    whole: bool = False,
    units: Set[nn.Module] = frozenset(),
) -> None:
    if is_compiled_module(module):
        return
    inner = next(module.children()) if isinstance(module, torch_private.ActivationWrapper) else None
    whole = whole or module in units
    if inner is not None:  # what recomputes is around a compiled block, not in it
        _compile_regions(inner, compile_one, whole, units)
    elif whole or _is_region(module) and units.isdisjoint(module.modules()):
        compile_one(module)
    else:
        blocks = is_repeated_blocks(module)
        for child in module.children():
            _compile_regions(child, compile_one, blocks, units)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a module's regions in place and return it, as fully_shard needs it: its hooks are on the modules.

    Args:
        module: The module to compile; see ``compile_regions`` for the regions. An innermost unit of ``fully_shard`` is also one.
        **compile_kwargs: Passed to ``Module.compile``.
    """
    if units := torch_private.sharded_units(module):
        innermost = {unit for unit in units if unit is not module and len(torch_private.sharded_units(unit)) == 1}
        _compile_regions(module, functools.partial(_compile_forward, compile_kwargs), units=innermost)
        if all("forward" not in part.__dict__ for part in module.modules()):
            warn_user(
                f"TorchDynamoPlugin(use_regional_compilation=True) compiled nothing of {type(module).__name__}: it has no list of equal blocks, "
                "and no unit of FSDP2 but single layers. Name its blocks in transformer_cls_names_to_wrap."
            )
    else:
        compile_regions_deepspeed(module, **compile_kwargs)
    return module


def _compile_forward(options: dict[str, Any], module: nn.Module) -> None:
    """Compile a module's forward without the hooks of `fully_shard`: it is one graph then, and `fullgraph` holds."""
    module_name = torch_private.shards_own_class(module).__module__
    # A single layer of torch gains nothing, and all such layers share one function, of which torch keeps few versions.
    if next(module.children(), None) is not None or not module_name.startswith("torch.nn."):
        module.forward = torch.compile(module.forward, **options)


# Names of parameters ---------------------------------------------------------------------------------------------------


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile, FSDP1 and activation checkpointing put in.

    The leading ``module.`` of DistributedDataParallel stays, because a user's own attribute may have that name.
    """
    return ".".join(itertools.filterfalse(INNER_ATTRIBUTES.__contains__, name.split(".")))


def canonical_names(names: Iterable[str]) -> list[str]:
    """Return `canonical_name` of each of some names."""
    return list(map(canonical_name, names))


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
            kept = first.setdefault((tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()), name)
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
