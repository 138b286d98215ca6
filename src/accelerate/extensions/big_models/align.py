"""The hook that has a module's weights on its device during forward, and elsewhere between two."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.comm.operations import send_to_device
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
from accelerate.extensions.big_models.tensors import find_device, named_module_tensors

# The module that holds a tensor, its table that has the tensor, and the tensor's name there.
_Place = tuple[nn.Module, dict[str, Any], str]
# Of a shared weight, by its `data_ptr`: the copy on each device.
_Copies = dict[int, dict[Any, torch.Tensor]]

_uncompiled: dict[Callable[..., None], Callable[..., None]] = {}


def _compiler_disable(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that `torch.compile` skips, because it fails on some tensors that are moved. Importing torch's decorator takes a second."""
    if method not in _uncompiled:
        _uncompiled[method] = torch.compiler.disable(method)
    return _uncompiled[method]


class Residency:
    """The weights of one module that are in it between `enter` and `leave`, and on the meta device otherwise.

    Attributes:
        source: Where they are read from.
        shared: The `data_ptr` of each weight that other modules share, by name. It is kept because a value from a file has a new address
            each time, maybe that of a freed one.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.shared: dict[str, int] = {}
        # Stored weights that needed no copy, with the parameters made of them, to be used again.
        self._stored: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # What is in the module now: where, the tensor, and the empty one that it replaced.
        self._present: dict[str, tuple[_Place, torch.Tensor, torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Copies bring their own weights.
        return {**self.__dict__, "_stored": {}, "_present": {}}

    def enter(
        self,
        places: Iterable[tuple[str, _Place, torch.Tensor]],
        device: Device,
        ahead: Mapping[str, torch.Tensor],
        copies: _Copies | None,
    ) -> None:
        """Put the weights into the module.

        Args:
            places: Name below the module, place and present tensor of each parameter and buffer that may be elsewhere.
            device: Where they go.
            ahead: Weights that were read ahead.
            copies: The `tied_params_map` of the hook.
        """
        source = self.source
        for name, place, empty in places:
            value = ahead.get(name)
            if value is None or value.dtype is not empty.dtype:
                value = source.get(name)
                if value is None and source.weights_map is not None:
                    continue
            stored, filled = self._stored.get(name, (None, empty))
            is_stored = stored is value and stored is not None and filled.data_ptr() == value.data_ptr()
            if is_stored and filled is empty:
                continue  # left there by a forward that raised
            if is_stored and empty.is_meta and filled.dtype is empty.dtype:
                if filled.requires_grad is not empty.requires_grad:
                    filled.requires_grad_(empty.requires_grad)
                if empty.__dict__:
                    filled.__dict__.update(empty.__dict__)
                place[1][place[2]] = filled
            else:
                filled = self._fill(name, place, value, device, copies if name in self.shared else None)
            self._present[name] = (place, filled, empty)

    def _fill(
        self, name: str, place: _Place, value: torch.Tensor | None, device: Device, copies: _Copies | None
    ) -> torch.Tensor:
        """Make a tensor of a value, put it into its place and return it."""
        owner, table, key = place
        empty, scales = table[key], self.source.scales(name, value)
        set_module_tensor_to_device(owner, key, device, value, None, scales, tied_params_map=copies, clear_cache=False)
        filled = table[key]
        # The stored weight is worth keeping. Copies are not, because memory is what offloading saves.
        is_stored = value is not None and name not in self.shared and filled.data_ptr() == value.data_ptr()
        if is_stored and type(empty) in PLAIN and empty.is_meta and self.source.raw(name) is value:
            self._stored[name] = (value, filled)
        return filled

    def leave(self, device: Device | None, copies: _Copies | None) -> None:
        """Take the weights out of the module, and drop the copies of shared ones on the device."""
        for name, ((owner, table, key), filled, empty) in self._present.items():
            now = table.get(key)
            if now is filled and empty.is_meta and filled.dtype is empty.dtype and type(empty) in PLAIN:
                if filled.grad is not None:
                    self._stored.pop(name, None)
                if filled.requires_grad is not empty.requires_grad:
                    empty.requires_grad_(filled.requires_grad)
                table[key] = empty
            elif now is not None and not now.is_meta:
                set_module_tensor_to_device(owner, key, "meta")
        self._present.clear()
        for pointer in self.shared.values():
            (copies or {}).get(pointer, {}).pop(device, None)


class AlignDevicesHook(ModelHook):
    """Has a module's weights and inputs on one device during forward, and optionally keeps the weights elsewhere
    between. The public attributes are those of the interface, which others read and replace; a `Residency` moves the weights.

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

    Attributes:
        prefetcher: What reads the weights of this module ahead; set by `attach_prefetcher`.
        leads: The prefetcher of a model whose root has this hook.
        ties: For an offloaded model, the groups of names that shared a parameter.
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
        self.tied_params_map = tied_params_map
        self.prefetcher: Prefetcher | None = None
        self.leads: Prefetcher | None = None
        self.ties: Sequence[Sequence[str]] = ()
        # The execution device, as it was given and exactly.
        self._target: tuple[Any, Any] = (None, None)
        self._residency = Residency(WeightSource(weights_map))

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def residency(self) -> Residency:
        """What moves the weights. It reads from what `weights_map` is now, which others may replace at any time."""
        if self._residency.source.weights_map is not self.weights_map:
            self._residency.source = WeightSource(self.weights_map)
        return self._residency

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
        residency = self.residency
        for name in offloaded:
            value = residency.source.get(name) if self.tied_params_map else None
            if value is not None and value.data_ptr() in self.tied_params_map:
                self.tied_params_names.add(name)
                residency.shared[name] = value.data_ptr()
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
                self._enter(module)
        else:
            self._enter(module)

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

    def _enter(self, module: nn.Module) -> None:
        ahead = self.prefetcher.enter(self) if self.prefetcher is not None else {}
        self.residency.enter(self._places(module), self.execution_device, ahead, self.tied_params_map)

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
        if self.offload:
            self._residency.leave(self.execution_device, self.tied_params_map)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring offloaded weights back to the device they came from."""
        if self.leads is not None:
            self.leads.close()  # it starts again if the hook comes back, as when another one is appended
        if self.offload:
            present, source = dict(named_module_tensors(module, recurse=self.place_submodules)), self.residency.source
            offloaded = {name for name, _ in self.offloaded_tensors(module)}
            for name, device in self.original_devices.items():
                if device.type == "meta" or name not in present:
                    continue
                # A buffer that stayed in the module may have changed since the map was made.
                stayed = name not in offloaded and present[name].device.type != "meta"
                value = None if stayed else source.get(name)
                if value is None and present[name].device.type == "meta":
                    continue  # no data anywhere
                scales = source.scales(name, value)
                set_module_tensor_to_device(module, name, device, value=value, fp16_statistics=scales)
        return module
