"""Models larger than one device: making them empty, spreading them over devices, offloading what does not fit."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.base import _lazy
from accelerate.base.environment import parse_flag_from_env
from accelerate.extensions.big_models.device_map import (
    check_device_map,  # looked up here at each call: transformers replaces it here
    check_devices,
    computed_map,
    disjoint_map,
)
from accelerate.extensions.big_models.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    _accelerate_added_attributes,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from accelerate.extensions.big_models.hooks_base import collection_paused, guard_method
from accelerate.extensions.big_models.loading import CheckpointLoad
from accelerate.extensions.big_models.loading import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.extensions.big_models.placement import Device, as_device, as_parameter
from accelerate.extensions.big_models.prefetch import aligning_hook, attach_prefetcher, prefetch_budget
from accelerate.extensions.big_models.store import OffloadedWeightsLoader
from accelerate.extensions.big_models.tensors import (
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from accelerate.extensions.big_models.weights import (
    Offloading,
    check_data,
    name_tied_weights,
    shared_pointers,
    state_tensors,
)

__getattr__ = _lazy.aliases("accelerate.big_modeling")

logger = logging.getLogger("accelerate.big_modeling")

# Layers whose weights may be stored in a narrower dtype than they compute in. Normalisations and embeddings are absent:
# they lose too much.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


def init_empty_weights(include_buffers: bool | None = None) -> contextlib.AbstractContextManager:
    """Have the parameters of modules made inside live on the meta device, so that a model larger than memory can be
    made.

    Works as a ``with`` block and as a decorator. Such a model has shapes and dtypes, but no data: load a checkpoint
    with `load_checkpoint_and_dispatch` before using it.

    Not a collective.

    Args:
        include_buffers: Put buffers on the meta device too, and every other tensor made inside. None: as
            ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else no.

    Example:
        >>> with init_empty_weights():
        ...     layer = nn.Linear(1000, 1000)
        >>> layer.weight.device.type
        'meta'
    """
    return init_on_device(torch.device("meta"), include_buffers=include_buffers)


@contextlib.contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Have the parameters of modules made inside live on a device. Works as a ``with`` block and as a decorator.

    Not a collective.

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
            if is_lazy(param):
                # It has no data yet; its module makes them at its first forward, on the parameter's device.
                moved = type(param)(requires_grad=param.requires_grad, device=device, dtype=param.dtype)
                vars(moved).update(vars(param))
                param = moved
            elif param.device != torch.device(device):
                # Out of the meta device there is nothing to copy: such a parameter is still to be initialised.
                made = torch.empty_like(param, device=device) if param.is_meta else param.detach().to(device)
                param = as_parameter(param, made.detach())
            module._parameters[name] = param  # in any case: the block may be in another one, which has moved it

    nn.Module.register_parameter = register_on_device
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    prefetch: bool | int | str | None = None,
) -> nn.Module:
    """Keep a model's weights on the CPU; each module's weights visit the execution device for its forward.

    Not a collective.

    Args:
        model: The model, changed in place.
        execution_device: Where forwards run. None: where the first parameter is.
        offload_buffers: Offload buffers too.
        state_dict: The weights to keep on the CPU. None: the model's.
        preload_module_classes: Names of classes whose instances load everything below them at once, because they use
            weights of submodules without calling their forward.
        prefetch: Read the weights of the next modules while one computes, as for `dispatch_model`.

    Returns:
        The same model.

    Raises:
        ValueError: A tensor has no data anywhere. The model is as it was.

    Example:
        >>> from accelerate import cpu_offload
        >>> model = cpu_offload(torch.nn.Linear(2, 1), execution_device="cpu")
        >>> model.weight.device, model(torch.ones(1, 2)).shape
        (device(type='meta'), torch.Size([1, 1]))
    """
    prefetch_budget(prefetch)  # before anything is changed
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in state_tensors(model).items() if not tensor.is_meta}
    weights, tied = OffloadedWeightsLoader(dict(state_dict)), find_tied_parameters(model)
    name_tied_weights(weights, tied)
    if len(weights) > len(state_dict):  # a tied weight is given under one of its names
        state_dict = weights.state_dict
    check_data(model, {"": "cpu"}, {"cpu"}, state_dict, tied, offload_buffers)
    _offload_all(model, state_dict, execution_device, offload_buffers, preload_module_classes, prefetch)
    return model


def _offload_all(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    execution_device: Device | None,
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
    prefetch: bool | int | str | None,
) -> None:
    """Offload every module of a model whose weights are kept somewhere already."""
    if execution_device is None:
        execution_device = next(model.parameters()).device
    tied = find_tied_parameters(model)
    with collection_paused():
        add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
        preload = {"preload_module_classes": preload_module_classes}
        attach_align_device_hook(model, execution_device, True, weights, offload_buffers, **preload)
        aligning_hook(model).ties = tied
        attach_prefetcher(model, prefetch)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until its forward; then it stays on the device until the hook offloads it.

    For pipelines that run several models in turn, of which one fits on the device at a time.

    Not a collective.

    Args:
        model: The model, changed in place.
        execution_device: Where forward runs. None: this process's device.
        prev_module_hook: What this function returned for the model that runs before; it is offloaded when this one runs.

    Returns:
        The model, and a hook with methods ``offload`` and ``remove``.

    Example:
        >>> first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
        >>> second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=first_hook)
        >>> _ = second(first(torch.ones(1, 2)))
        >>> second_hook.offload()
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    prefetch: bool | int | str | None = None,
) -> nn.Module:
    """Keep a model's weights in files; each module's weights are read for its forward.

    Not a collective.

    Args:
        model: The model, changed in place.
        offload_dir: Folder of the files. What its ``index.json`` has is used; the rest is written.
        execution_device: Where forwards run. None: where the first parameter is.
        offload_buffers: Offload buffers too.
        preload_module_classes: As for `cpu_offload`.
        prefetch: As for `dispatch_model`.

    Returns:
        The same model.

    Raises:
        OSError: The disk is full; then the folder and the model are as they were.
        ValueError: What the folder has does not fit the model.

    Example:
        >>> import tempfile
        >>> from accelerate import disk_offload
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = disk_offload(torch.nn.Linear(2, 1), folder, execution_device="cpu")
        ...     model(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    prefetch_budget(prefetch)  # before anything is changed
    kept = Offloading(model, {"": "disk"}, {"disk"}, offload_buffers, offload_dir=offload_dir)
    kept.check()
    _offload_all(model, kept.gather(), execution_device, offload_buffers, preload_module_classes, prefetch)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: dict[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike | None = None,
    offload_index: Mapping[str, dict] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    prefetch: bool | int | str | None = None,
) -> nn.Module:
    """Spread a model over devices as a device map says, with hooks that move inputs and offloaded weights.

    Not a collective.

    Args:
        model: The model, changed in place; it gets the attribute ``hf_device_map``.
        device_map: Module name to accelerator index, ``"cpu"`` (offloaded, where there is an accelerator) or ``"disk"``.
            A map of one device moves the model there, without hooks.
        main_device: Where offloaded modules run. None: the first device that is neither ``"cpu"`` nor ``"disk"``, else
            the CPU.
        state_dict: The weights of modules on ``"cpu"``. None: the model's.
        offload_dir: Folder for modules on ``"disk"``. If it has an ``index.json``, its weights are used.
        offload_index: Where weights on disk are, as for `OffloadedWeightsLoader`; then nothing is written.
        offload_buffers: Offload buffers too.
        skip_keys: Keyword arguments that hooks leave where they are.
        preload_module_classes: As for `cpu_offload`.
        force_hooks: Use hooks even with one device, so that inputs are moved to it.
        prefetch: Whether offloaded weights of the next modules are read while one computes. True: as much ahead as the largest
            module takes. A number of bytes, or text such as ``"2GiB"``: as much as that. False: not. None: what
            ``ACCELERATE_OFFLOAD_PREFETCH`` says, else True.

    Returns:
        The same model. Its ``to`` and the like warn, and raise if parts are offloaded.

    Raises:
        FileNotFoundError: The index names a file that is not there.
        OSError: The disk is full. Nothing is left behind.
        ValueError: A tensor has no device or no data, a device is not there, or modules go to disk and there is no place for
            them. The model is as it was.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> dispatch_model(model, {"": "cpu"}).hf_device_map
        {'': 'cpu'}
    """
    check_device_map(model, device_map)
    check_devices(device_map)
    prefetch_budget(prefetch)  # before anything is changed
    devices = set(device_map.values())
    tied = find_tied_parameters(model)
    if getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_8bit", False):
        # A quantised model cannot simply be moved.
        force_hooks = force_hooks or not devices & {"cpu", "disk"}
    if len(devices) == 1 and "disk" not in devices and not force_hooks:
        check_data(model, device_map, set(), (), tied, offload_buffers)
        model.to(as_device(next(iter(devices))))
        retie_parameters(model, tied)
        model.hf_device_map = dict(device_map)
        return model
    if main_device is None:
        main_device = next((device for device in device_map.values() if device not in ("cpu", "disk")), "cpu")
    offloaded_to = {"disk"} if main_device == "cpu" else {"cpu", "disk"}
    places = disjoint_map(model, device_map)
    kept = Offloading(model, places, offloaded_to, offload_buffers, state_dict, offload_dir, offload_index)
    kept.check()
    weights = kept.gather()
    check_tied_parameters_on_same_device(tied, device_map)
    execution = {name: main_device if device in offloaded_to else device for name, device in places.items()}
    execution.setdefault("", main_device)
    offload = {name: device in offloaded_to for name, device in places.items()}
    options = {"skip_keys": skip_keys, "preload_module_classes": preload_module_classes}
    options["tied_params_map"] = shared_pointers(model, tied)
    with collection_paused():
        attach_align_device_hook_on_blocks(model, execution, offload, weights, offload_buffers, **options)
        # Weights that were moved one by one are tied no more.
        retie_parameters(model, tied)
        aligning_hook(model).ties = tied
        attach_prefetcher(model, prefetch)
    for name in _accelerate_added_attributes:
        if hasattr(model, name):
            guard_method(model, name, _refuse_move)
    if devices & offloaded_to:
        logger.info(
            "Modules are offloaded to %s; their parameters are on the meta device between forwards.",
            " and ".join(sorted(devices & offloaded_to)),
        )
    model.hf_device_map = dict(device_map)
    return model


def _refuse_move(model: nn.Module) -> None:
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise RuntimeError(
            "You can't move a model that has some modules offloaded to cpu or disk. Remove the hooks first: "
            "`accelerate.hooks.remove_hook_from_submodules(model)`."
        )
    logger.warning(
        "You shouldn't move a model that is dispatched using accelerate hooks: inputs keep going where they did."
    )


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike,
    device_map: str | dict[str, Device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_folder: str | os.PathLike | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    prefetch: bool | int | str | None = None,
) -> nn.Module:
    """Read a checkpoint into a model, straight to the devices where its weights belong, and dispatch the model.

    Not a collective, unless `broadcast_from_rank0` is set.

    Args:
        model: The model, changed in place; usually made under `init_empty_weights`.
        checkpoint: A file with a state dict, the index of a sharded checkpoint, or a folder with either.
        device_map: Module name to device, or ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"`` to have one
            computed. None: nothing is dispatched.
        max_memory: For a computed map, the most that each device may take, as for `get_max_memory`.
        no_split_module_classes: For a computed map, names of classes whose instances stay on one device.
        offload_folder: Where weights go whose device is ``"disk"``, with an index. A checkpoint in safetensors is read in place, so
            that only the index is written, and without a folder nothing.
        offload_buffers: Offload buffers too.
        dtype: Dtype that floating-point weights are cast to.
        offload_state_dict: As for `load_checkpoint_in_model`.
        skip_keys: Keyword arguments that hooks leave where they are.
        preload_module_classes: As for `cpu_offload`.
        force_hooks: Use hooks even with one device.
        strict: Raise when names in the checkpoint and in the model differ.
        full_state_dict: As for `load_checkpoint_in_model`.
        broadcast_from_rank0: As for `load_checkpoint_in_model`.
        prefetch: As for `dispatch_model`.

    Returns:
        The same model.

    Raises:
        FileNotFoundError: A file of the checkpoint is missing.
        OSError: The disk is full; then the folder is as it was.
        RuntimeError: ``strict``, and names differ.
        ValueError: ``device_map`` is text but none of the four, a file is truncated or does not fit the model, or a weight has no
            place. The model is as it was.

    Example:
        >>> import tempfile
        >>> from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Accelerator(cpu=True).save_model(torch.nn.Linear(2, 1), folder)
        ...     with init_empty_weights():
        ...         model = torch.nn.Linear(2, 1)
        ...     model = load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
        >>> model.weight.device
        device(type='cpu')
    """
    prefetch_budget(prefetch)  # before anything is changed
    if isinstance(device_map, str):
        options = {"no_split_module_classes": no_split_module_classes, "dtype": dtype}
        device_map = computed_map(model, device_map, max_memory, offload_buffers, **options)
    sharded = {"full_state_dict": full_state_dict, "broadcast_from_rank0": broadcast_from_rank0}
    options = {"strict": strict, "whole": True, **sharded}
    index = CheckpointLoad(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, **options).run()
    if device_map is None:
        return model
    places = {"offload_dir": offload_folder, "offload_index": index or None, "offload_buffers": offload_buffers}
    hooks = {"skip_keys": skip_keys, "preload_module_classes": preload_module_classes, "force_hooks": force_hooks}
    return dispatch_model(model, device_map, **places, **hooks, prefetch=prefetch)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a narrow dtype, and cast each layer's up for its forward.

    Args:
        module: The root; it and everything below are searched.
        storage_dtype: Dtype between forwards, such as ``torch.float8_e4m3fn``.
        compute_dtype: Dtype during forward.
        skip_modules_pattern: Regular expressions; modules whose full name has a match for one are left alone, with all
            below them.
        skip_modules_classes: Modules of these classes are left alone, with all below them.
        non_blocking: Let casts overlap with computation where the device can.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
        >>> model[0].weight.dtype, model[1].weight.dtype
        (torch.bfloat16, torch.float32)
    """
    _attach_layerwise_casting_hooks(
        module, storage_dtype, compute_dtype, skip_modules_pattern, skip_modules_classes, non_blocking
    )


def _attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    non_blocking: bool = False,
    _prefix: str = "",
) -> None:
    """Do what `attach_layerwise_casting_hooks` does, for a module whose full name is `_prefix`."""
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    classes = (skip_modules_classes,) if isinstance(skip_modules_classes, type) else tuple(skip_modules_classes or ())
    if isinstance(module, classes) or any(re.search(pattern, _prefix) for pattern in patterns):
        logger.debug("Layerwise casting leaves %r alone.", _prefix)
    elif isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        logger.debug("Layerwise casting stores %r as %s.", _prefix, storage_dtype)
        add_hook_to_module(module, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
    else:
        for name, child in module.named_children():
            full = f"{_prefix}.{name}" if _prefix else name
            _attach_layerwise_casting_hooks(child, storage_dtype, compute_dtype, patterns, classes, non_blocking, full)
