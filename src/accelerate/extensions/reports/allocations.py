"""The contents of a rank's memory at its peak: living tensors by kind and by module, on any device or on none."""

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.extensions.reports.torch_private import is_distributed, replaced
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import pytree

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
EXCHANGED, ACTIVATIONS, PROGRAM = "gathered and exchanged", "activations", "held by the program"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, EXCHANGED, ACTIVATIONS, PROGRAM)
# A new peak is looked into once it is higher than the last one by this part.
_HIGHER = 1.001


@dataclass(eq=False)
class _Held:
    """Memory of tensors: its bytes, its kind, and the module whose forward made it, or a name."""

    size: int
    reference: Any
    module: Any
    kind: str = ACTIVATIONS


class AllocationTracker:
    """Follows the memory of tensors from the operators that make them; `see` gets the result of each.

    It counts tensors, without the rounding and cache of an allocator and the workspace of kernels.

    Not a collective.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Held] = {}
        # Living memory, by kind.
        self.bytes: Counter[str] = Counter()
        self._looked_at = 0
        self._at_peak: list[tuple[_Held, int]] = []
        self._modules: list[nn.Module] = []
        # Calls since the last `peak` of modules that no other module called, by identity.
        self.forwards: Counter[int] = Counter()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules, and memory that strategies take and give back without an operator."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            allocation = self._live.get(id(storage))
            if allocation is not None and size < allocation.size:
                self._look()
            result = resize(storage, size)
            if allocation is not None:
                self._count(allocation, size, EXCHANGED)  # unsharded parameters, which `fully_shard` frees in this way
            return result

        hooks = nn.modules.module
        with contextlib.ExitStack() as last:
            last.enter_context(replaced((torch.UntypedStorage, "resize_", resized)))
            last.callback(hooks.register_module_forward_pre_hook(self._enter).remove)
            last.callback(hooks.register_module_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._modules:
            self.forwards[id(module)] += 1
        self._modules.append(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        while self._modules and self._modules.pop() is not module:
            continue  # of a module that was left by an error

    def see(self, result: Any, kind: str | None = None, module: Any = None) -> None:
        """Note the memory of tensors, which may be nested, and its kind."""
        for tensor in (result,) if isinstance(result, torch.Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._see(torch_private.local_part(tensor), kind, module)

    def _see(self, tensor: torch.Tensor, kind: str | None, module: Any) -> None:
        if tensor.is_meta or is_distributed(type(tensor)):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        allocation = self._live.get(key)
        if allocation is None:
            made_in = weakref.ref(self._modules[-1]) if self._modules else None
            reference = weakref.ref(storage, lambda _: self._freed(key))
            allocation = self._live[key] = _Held(0, reference, made_in)
            self._count(allocation, storage.nbytes(), ACTIVATIONS)
        if kind is not None:
            self._count(allocation, allocation.size, kind)
            allocation.module = module if module is not None else allocation.module

    def _count(self, allocation: _Held, size: int, kind: str) -> None:
        self.bytes[allocation.kind] -= allocation.size
        self.bytes[kind] += size
        allocation.size, allocation.kind = size, kind

    def _freed(self, key: int) -> None:
        self._look()
        if (allocation := self._live.pop(key, None)) is not None:
            self.bytes[allocation.kind] -= allocation.size

    def _look(self) -> None:
        if (current_bytes := self.bytes.total()) > self._looked_at * _HIGHER:
            self._looked_at = current_bytes
            self._at_peak = [(allocation, allocation.size) for allocation in self._live.values()]

    def peak(self, name_of: Callable[[nn.Module], str]) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes at the peak since the last call by kind and by module, and begin again; a step has ended.

        Args:
            name_of: gives the name of a module.
        """
        self._look()
        for allocation in self._live.values():
            if allocation.kind == ACTIVATIONS:  # what outlives a step is none
                self._count(allocation, allocation.size, PROGRAM)
        kinds, modules = dict.fromkeys(KINDS, 0), Counter[str]()
        for allocation, size in self._at_peak:
            kinds[allocation.kind] += size
            made_in = allocation.module() if isinstance(allocation.module, weakref.ref) else allocation.module
            name = name_of(made_in) if isinstance(made_in, nn.Module) else made_in
            if name is not None:
                modules[re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)] += size
        self._at_peak, self._looked_at = [], 0
        self.forwards.clear()
        return kinds, dict(modules)


def label(tracker: AllocationTracker, models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Return which memory is parameters, buffers, gradients and states of optimizers, by the module that each belongs to."""
    owners: dict[int, str] = {}
    for model in models:
        for prefix, module in model.named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                owners[id(tensor)] = prefix
                tracker.see(tensor, PARAMETERS, prefix)
                if tensor.grad is not None:
                    tracker.see(tensor.grad, GRADIENTS, prefix)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tracker.see(state, OPTIMIZER, owners.get(id(parameter), ""))
