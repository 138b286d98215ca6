"""The hook that has a module's weights on its device during forward, and elsewhere between two."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.comm.operations import find_device, send_to_device
from accelerate.extensions.big_models.hooks_base import ModelHook
from accelerate.extensions.big_models.placement import (
    PLAIN,
    Device,
    any_elsewhere,
    exact_device,
    set_module_tensor_to_device,
)
from accelerate.extensions.big_models.prefetch import Prefetcher
from accelerate.extensions.big_models.store import WeightSource
from accelerate.extensions.big_models.tensors import named_module_tensors

# The module that holds a tensor, the table of it that has the tensor, and the tensor's name there.
_Place = tuple[nn.Module, dict[str, Any], str]

_uncompiled: dict[Callable[..., None], Callable[..., None]] = {}


def _compiler_disable(method: Callable[..., None]) -> Callable[..., None]:
    """A method that moves weights, without `torch.compile`, which would compile nothing of it and fail at some; its
    own decorator would take a second to import for those who never compile.
    """
    if method not in _uncompiled:
        _uncompiled[method] = torch.compiler.disable(method)
    return _uncompiled[method]


class AlignDevicesHook(ModelHook):
    """Has a module's weights and inputs on one device during forward, and optionally keeps the weights elsewhere
    between.

    Args:
        execution_device: Where forward runs. None: nothing is moved there.
        offload: Keep the weights in ``weights_map`` and on the meta device between forwards.
        io_same_device: Return outputs on the device that the inputs came from.
        weights_map: Where offloaded weights are read from, by their name below the module. None: the module's present
            weights are kept on the CPU.
        offload_buffers: Offload buffers too.
        place_submodules: Do all this for the tensors of submodules as well.
        skip_keys: Keyword arguments (and keys of an output) that stay where they are.
        tied_params_map: ``data_ptr`` of a shared weight -> device -> its copy there, shared among hooks so that tied
            weights are brought to a device once.
    """

    __module__ = "accelerate.hooks"  # the path in pickles

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self._target: tuple[Any, Any] = (None, None)
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.input_device: Device | None = None
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self._tied_pointers: dict[str, int] = {}
        self.tied_params_map = tied_params_map
        # Set by `attach_prefetcher`: who reads this module's weights ahead, and whose model's root this hook is on.
        self.prefetcher: Prefetcher | None = None
        self.leads: Prefetcher | None = None
        # Set on the hook of an offloaded model: the groups of names that shared a parameter.
        self.ties: Sequence[Sequence[str]] = ()
        # Parameters made of weights that needed no copy, to be used again; and what is in the module now, by name, with the
        # place that it is in and what it replaced there.
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._present: dict[str, tuple[_Place, torch.Tensor, torch.Tensor]] = {}
        self._source = WeightSource(weights_map)

    def __getstate__(self) -> dict[str, Any]:
        # Copies bring in weights of their own.
        return {**self.__dict__, "_kept": {}, "_present": {}}

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def source(self) -> WeightSource:
        """Where offloaded weights are read from: what `weights_map` is now, which others may replace at any time."""
        if self._source.weights_map is not self.weights_map:
            self._source = WeightSource(self.weights_map)
        return self._source

    def offloaded_tensors(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that are elsewhere between forwards: not buffers that are in no checkpoint, which stay."""
        tensors = named_module_tensors(
            module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
        )
        return [(name, tensor) for name, tensor in tensors if self.weights_map is None or name in self.weights_map]

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Bring the weights to the execution device, or, with ``offload``, out of the module."""
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        offloaded = [name for name, _ in self.offloaded_tensors(module)] if self.offload else []
        if self.offload:
            self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        if self.offload and self.weights_map is None:
            empty = [name for name in offloaded if tensors[name].device.type == "meta"]
            if empty:
                raise ValueError(
                    f"{empty[0]!r} of {type(module).__name__} is on the meta device and has no data to offload: give a "
                    "`weights_map` that has it."
                )
            self.weights_map = {name: tensors[name].to("cpu") for name in offloaded}
        for name in offloaded:
            value = self.source.get(name) if self.tied_params_map else None
            if value is not None and value.data_ptr() in self.tied_params_map:
                # Kept, because a value from a file has a new address each time, maybe that of a freed one.
                self.tied_params_names.add(name)
                self._tied_pointers[name] = value.data_ptr()
            set_module_tensor_to_device(module, name, "meta")
        if self.execution_device is not None:
            # What is not offloaded lives where forward needs it.
            for name in tensors:
                if name not in offloaded:
                    set_module_tensor_to_device(
                        module, name, self.execution_device, tied_params_map=self.tied_params_map, clear_cache=False
                    )
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Bring offloaded weights and the inputs to the execution device."""
        if self.leads is not None or self.offload:
            if torch.compiler.is_compiling():
                _compiler_disable(AlignDevicesHook._arrive)(self, module)
            else:
                self._arrive(module)
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.execution_device is None:
            return args, kwargs
        given, target = self._target
        # Others may replace it at any time; to look a device up takes as long as the rest.
        if given is not self.execution_device:
            given, target = self._target = self.execution_device, exact_device(self.execution_device)
        if any_elsewhere(args, target):
            args = send_to_device(args, self.execution_device)
        if kwargs and any_elsewhere(kwargs, target):
            kwargs = send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys)
        return args, kwargs

    def _arrive(self, module: nn.Module) -> None:
        if self.leads is not None:
            self.leads.begin()
        if not self.offload or self.execution_device is None:
            return
        if torch.is_inference_mode_enabled():
            # A tensor that is made in inference mode computes in other ways, with other bits, and never works outside of it.
            with torch.inference_mode(False):
                self._load_weights(module)
        else:
            self._load_weights(module)

    def _places(self, module: nn.Module) -> Iterator[tuple[str, _Place, torch.Tensor]]:
        """Yield what may be elsewhere between forwards: a name below the module, where it is, and the tensor there."""
        for path, owner in module.named_modules() if self.place_submodules else (("", module),):
            prefix = f"{path}." if path else ""
            for name, tensor in owner._parameters.items():
                if tensor is not None:
                    yield prefix + name, (owner, owner._parameters, name), tensor
            for name, tensor in owner._buffers.items() if self.offload_buffers else ():
                if tensor is not None and name not in owner._non_persistent_buffers_set:
                    yield prefix + name, (owner, owner._buffers, name), tensor

    def _load_weights(self, module: nn.Module) -> None:
        ahead = self.prefetcher.enter(self) if self.prefetcher is not None else {}
        source = self._source if self._source.weights_map is self.weights_map else self.source
        for name, place, empty in self._places(module):
            value = ahead.get(name)
            if value is None or value.dtype is not empty.dtype:
                value = source.get(name)
                if value is None and self.weights_map is not None:
                    continue
            known, filled = self._kept.get(name, (None, empty))
            again = known is value and known is not None and filled.data_ptr() == value.data_ptr()
            if again and filled is empty:
                continue  # left there by a forward that raised
            if again and empty.is_meta and filled.dtype is empty.dtype:
                if filled.requires_grad is not empty.requires_grad:
                    filled.requires_grad_(empty.requires_grad)
                if empty.__dict__:
                    filled.__dict__.update(empty.__dict__)
                place[1][place[2]] = filled
            else:
                filled = self._put_weight(name, place, value)
            self._present[name] = (place, filled, empty)

    def _put_weight(self, name: str, place: _Place, value: torch.Tensor | None) -> torch.Tensor:
        owner, table, last = place
        empty, tied = table[last], name in self.tied_params_names
        scales, known = self.source.scales(name, value), self.tied_params_map if tied else None
        set_module_tensor_to_device(
            owner, last, self.execution_device, value, None, scales, tied_params_map=known, clear_cache=False
        )
        filled = table[last]
        # The stored weight itself is worth keeping. Copies are not, because memory is what offloading saves.
        stored = not tied and value is not None and type(empty) in PLAIN and filled.data_ptr() == value.data_ptr()
        if stored and empty.is_meta and self.source.raw(name) is value:
            self._kept[name] = (value, filled)
        return filled

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Drop offloaded weights again, and bring the output to the inputs' device."""
        if self.leads is not None or self.offload:
            if torch.compiler.is_compiling():
                _compiler_disable(AlignDevicesHook._leave)(self, module)
            else:
                self._leave(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def _leave(self, module: nn.Module) -> None:
        if self.leads is not None:
            self.leads.end()
        if not self.offload:
            return
        for name, ((owner, table, last), filled, empty) in self._present.items():
            now = table.get(last)
            if now is filled and empty.is_meta and filled.dtype is empty.dtype and type(empty) in PLAIN:
                if filled.grad is not None:
                    self._kept.pop(name, None)
                if filled.requires_grad is not empty.requires_grad:
                    empty.requires_grad_(filled.requires_grad)
                table[last] = empty
            elif now is not None and not now.is_meta:
                set_module_tensor_to_device(owner, last, "meta")
        self._present.clear()
        for pointer in self._tied_pointers.values():
            (self.tied_params_map or {}).get(pointer, {}).pop(self.execution_device, None)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring offloaded weights back to the device they came from."""
        if self.leads is not None:
            self.leads.close()  # it goes on if the hook comes back, as when another one is appended
        if self.offload:
            present = dict(named_module_tensors(module, recurse=self.place_submodules))
            for name, device in self.original_devices.items():
                if device.type == "meta" or name not in present:
                    continue
                value = self.source.get(name)
                if value is None and present[name].device.type == "meta":
                    continue  # no data anywhere
                scales = self.source.scales(name, value)
                set_module_tensor_to_device(module, name, device, value=value, fp16_statistics=scales)
        return module
