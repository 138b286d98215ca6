"""A device of your own, by torch's "PrivateUse1" in Python: its memory is in the host, and the processor computes for it.

`install()` makes torch know it as "hosted" and `torch.hosted`, once in a process, and gives the package a row for it. What torch asks
of such a device: https://docs.pytorch.org/docs/stable/accelerator/index.html. Tensors are of another device for all that look:
mixing them with the processor's is an error, they have storages and a separate generator, and only torch's documented
functions is there to ask.
"""

import threading
import types

import torch
from torch.utils import _pytree as pytree

NAME, COUNT = "hosted", 2
# What autocast computes in its lower precision.
LOWERED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
_set = torch.ops.aten.set_.source_Storage_storage_offset
_random = torch.Generator()
_current = threading.local()


class Refused(RuntimeError):
    """An operation got tensors of two kinds of devices."""


def is_ours(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the processor's view of a tensor of the device: the same memory."""
    seen = torch.empty(0, dtype=tensor.dtype)
    memory = getattr(tensor.untyped_storage(), "memory", None)
    return seen if memory is None else seen.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def storage_of(memory: torch.UntypedStorage, index: int) -> torch.UntypedStorage:
    """Return the device's storage over memory of the host, which it keeps alive."""
    made = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, index), memory.nbytes())
    made.memory = memory
    return made


def place(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Let a tensor of the device are in a storage as another one does in the host's."""
    return _set._op_dk(
        torch._C.DispatchKey.CPU, tensor, storage, like.storage_offset(), tuple(like.shape), tuple(like.stride())
    )


def compute(op, *args, **kwargs):
    """Run any operation: on the host's views of the tensors, then back."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    index, given, stores = current_device(), [], {}
    for position, leaf in enumerate(leaves):
        if is_ours(leaf):
            seen = on_host(leaf)
            index = leaf.device.index or 0
            stores[seen.untyped_storage()._cdata] = leaf.untyped_storage()
            given.append((leaf, seen))
            leaves[position] = seen
        elif isinstance(leaf, torch.Tensor) and leaf.dim() and op.__name__ != "_copy_from.default":
            raise Refused(f"{op}: a tensor on {leaf.device} among those on {NAME}")
        elif isinstance(leaf, torch.device) and leaf.type == NAME:
            index, leaves[position] = leaf.index or index, torch.device("cpu")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with own_draws(op):
        result = op(*args, **kwargs)
    for leaf, seen in given:  # what the operation has resized
        if leaf.shape != seen.shape or leaf.data_ptr() != seen.data_ptr():
            place(leaf, storage_of(seen.untyped_storage(), index), seen)

    def back(value):
        if not isinstance(value, torch.Tensor):
            return value
        if (same := next((leaf for leaf, seen in given if seen is value), None)) is not None:
            return same
        storage = stores.get(value.untyped_storage()._cdata)
        empty = torch._C._acc.create_empty_tensor((0,), value.dtype)
        return place(empty, storage or storage_of(value.untyped_storage(), index), value)

    return pytree.tree_map(back, result)


class own_draws:
    """A context in which an operation that draws does so from the device's generator."""

    def __init__(self, op) -> None:
        self.draws = torch.Tag.nondeterministic_seeded in op.tags

    def __enter__(self) -> None:
        if self.draws:
            self.kept = torch.default_generator.get_state()
            torch.default_generator.set_state(_random.get_state())

    def __exit__(self, *error) -> None:
        if self.draws:
            _random.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(self.kept)


def copy_from(source, target, non_blocking=False):
    (on_host(target) if is_ours(target) else target).copy_(on_host(source) if is_ours(source) else source)
    return target


def set_storage(tensor, storage, offset, size, stride=()):
    return _set._op_dk(torch._C.DispatchKey.CPU, tensor, storage, offset, size, stride)


def set_whole_storage(tensor, storage):
    return set_storage(tensor, storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def lowered(op):
    """Return an operation under autocast."""

    def run(*args, **kwargs):
        dtype = torch.get_autocast_dtype(NAME)

        def lower(value):
            return value.to(dtype) if is_ours(value) and value.dtype is torch.float32 else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            args, kwargs = pytree.tree_map(lower, (args, kwargs))
            return op(*args, **kwargs)

    return run


def current_device() -> int:
    return getattr(_current, "index", 0)


def set_device(device) -> None:
    _current.index = device if isinstance(device, int) else torch.device(device).index or 0


def module() -> types.ModuleType:
    """Return `torch.hosted`: what torch's documentation asks for, and nothing else."""
    made = types.ModuleType(f"torch.{NAME}")
    made.is_available = made.is_initialized = lambda: True
    made._is_in_bad_fork = lambda: False
    made.device_count = lambda: COUNT
    made.current_device, made.set_device = current_device, set_device
    made.manual_seed = made.manual_seed_all = lambda seed: _random.manual_seed(int(seed)) and None
    made.get_rng_state = lambda device=NAME: _random.get_state()
    made.set_rng_state = lambda state, device=NAME: _random.set_state(state) and None
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return made


def install() -> None:
    """Make torch and the package know the device, once in a process."""
    global _library
    if hasattr(torch, NAME):
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from accelerate.config.enums import DistributedType
    from accelerate.devices import Device, register

    _setup_privateuseone_for_python_backend(NAME, backend_module=module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(compute, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    aten.impl("set_.source_Storage_storage_offset", set_storage, "PrivateUse1")
    aten.impl("set_.source_Storage", set_whole_storage, "PrivateUse1")
    for name in LOWERED:
        aten.impl(name, lowered(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    _library = everything, aten
    register(Device(NAME, DistributedType.MULTI_GPU, ("gloo",), None, torch.hosted.is_available))
