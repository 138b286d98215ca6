"""Adding hooks to modules and taking them off, and the hooks that move or cast whole modules.

`add_hook_to_module` replaces a module's forward by ``functools.partial(_hooked_forward, module)`` and keeps the
original in ``module._old_forward`` and the hook in ``module._hf_hook``. Other libraries read all three, and rebind the
second.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.comm.operations import send_to_device
from accelerate.extensions.big_models.placement import Device, as_device, check_device_same, default_device
from accelerate.extensions.big_models.tensors import retie_parameters
from accelerate.modules.offloaded import hooks_of

# Methods that dispatch_model replaces on a dispatched model, because moving such a model undoes the dispatch.
_accelerate_added_attributes = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]


class ModelHook:
    """Base of hooks: four methods around the life of a module, each of which does nothing here.

    No method is a collective.

    Attributes:
        no_grad: Whether the module's forward runs without recording gradients.
    """

    __module__ = "accelerate.hooks"  # the path in pickles

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module when the hook is added, and return it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Run before forward, on its inputs; return the arguments and keyword arguments that forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after forward, on its output; return what the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks in one; each method runs those of all hooks, first to last.

    No method is a collective.

    Args:
        *hooks: The hooks.
    """

    __module__ = "accelerate.hooks"  # the path in pickles

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run every hook's `init_hook`."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Run every hook's `pre_forward`, each on what the one before returned."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run every hook's `post_forward`, each on what the one before returned."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run every hook's `detach_hook`."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _hooked_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # At module level so that hooked modules pickle. Hook and forward are read at each call, so that replacing
    # either on the module takes effect.
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def _set_forward(module: nn.Module, forward: Any) -> None:
    if isinstance(module, torch.fx.GraphModule):
        # Each GraphModule has its own class, on which its code lives; compiling it again must replace the hook.
        # staticmethod, because Python is about to bind a partial found on a class to the instance.
        type(module).forward = staticmethod(forward)
    else:
        module.forward = forward


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Have a hook run around a module's forward.

    Not a collective.

    Args:
        module: The module, changed in place.
        hook: The hook. Its `init_hook` runs now.
        append: Keep the hook that the module has, and run it first. Otherwise it is replaced.

    Returns:
        The module that `init_hook` returned, usually the same one.

    Example:
        >>> class Double(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> layer = add_hook_to_module(nn.Identity(), Double())
        >>> layer(torch.ones(1))
        tensor([2.])
    """
    present = module.__dict__.get("_hf_hook")
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    original = module.__dict__.get("_old_forward") if "_hf_hook" in module.__dict__ else None
    if original is None:
        original = module.forward
    module = hook.init_hook(module)
    module._old_forward = original
    module._hf_hook = hook
    # update_wrapper, because signature probes must see the module's own parameters.
    _set_forward(module, functools.update_wrapper(functools.partial(_hooked_forward, module), original))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off a module, which then is as it was before `add_hook_to_module`.

    Not a collective.

    Args:
        module: The module, changed in place; without hook nothing happens.
        recurse: Also take the hooks off all its submodules.

    Returns:
        The same module.

    Example:
        >>> from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
        >>> model = add_hook_to_module(torch.nn.Linear(1, 1), ModelHook())
        >>> hasattr(remove_hook_from_module(model), "_hf_hook")
        False
    """
    own = module.__dict__
    ties = next((hook.ties for hook in hooks_of(module) if getattr(hook, "ties", ())), ()) if recurse else ()
    if "_hf_hook" in own:
        own["_hf_hook"].detach_hook(module)
        del module._hf_hook
    if "_old_forward" in own:
        original = own.pop("_old_forward")
        function = getattr(original, "__func__", None)
        of_class = getattr(original, "__self__", None) is module and function is not None
        if isinstance(module, torch.fx.GraphModule):
            type(module).forward = function if of_class else staticmethod(original)
        elif of_class and function is getattr(type(module), "forward", None):
            own.pop("forward", None)
        else:
            module.forward = original
    for name in _accelerate_added_attributes:
        _restore_method(module, name)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
        _tie_again(module, ties)
    return module


def _tie_again(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Make one parameter of each group that came back as several, unless the model was changed meanwhile."""
    for group in ties:
        try:
            parameters = [model.get_parameter(name) for name in group]
        except AttributeError:
            continue
        if len({(one.device, one.dtype, one.shape) for one in parameters}) == 1:
            retie_parameters(model, [group])


def guard_method(module: nn.Module, name: str, guard: Callable[..., None]) -> None:
    """Have a check run before a method of one module, until `remove_hook_from_module` takes it off again."""
    _restore_method(module, name)
    method = getattr(module, name)
    setattr(module, name, functools.update_wrapper(functools.partial(_guarded, module, name, guard), method))


def _guarded(module: nn.Module, name: str, guard: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
    guard(module)
    return module.__dict__[name].__wrapped__(*args, **kwargs)


def _restore_method(module: nn.Module, name: str) -> None:
    """Take a guard off; a method that other code put on the instance stays or comes back."""
    method = module.__dict__.get(name)
    if not isinstance(method, functools.partial) or method.func is not _guarded:
        return
    del module.__dict__[name]
    if getattr(method.__wrapped__, "__func__", None) is not getattr(type(module), name, None):
        setattr(module, name, method.__wrapped__)


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and all its submodules; offloaded weights come back.

    Not a collective.

    Args:
        module: The module, changed in place.
    """
    remove_hook_from_module(module, recurse=True)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """A ``with`` block that makes thousands of objects, all of which stay: each full collection would look at every one."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CpuOffload(ModelHook):
    """Keeps a module on the CPU until its forward, then moves it to a device, where it stays.

    Chained through ``prev_module_hook`` only one model of a pipeline is on the device at a time.

    Args:
        execution_device: Where forward runs. None: this process's device.
        prev_module_hook: The hook of the model that runs before; that model goes to the CPU first.
    """

    __module__ = "accelerate.hooks"  # the path in pickles

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: "UserCpuOffloadHook | None" = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Move the previous model to the CPU, and this one and the inputs to the execution device."""
        device = as_device(self.execution_device)
        if self.prev_module_hook is not None and isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.offload()
        if any(not check_device_same(parameter.device, device) for parameter in module.parameters()):
            module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """What `cpu_offload_with_hook` hands to the user: it moves the model back, or removes its hook.

    Args:
        model: The model.
        hook: Its `CpuOffload`.
    """

    __module__ = "accelerate.hooks"  # the path in pickles

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model; it stays where it is."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Stores a module's weights in one dtype and computes in another.

    Args:
        storage_dtype: Dtype between forwards, such as ``torch.float8_e4m3fn``.
        compute_dtype: Dtype during forward.
        non_blocking: Let casts overlap with computation where the device can.
    """

    __module__ = "accelerate.hooks"  # the path in pickles

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Cast the weights to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast the weights back to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the weights in the compute dtype, in which the module works without this hook."""
        return module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
