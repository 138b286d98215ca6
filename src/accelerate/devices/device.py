"""The interface of a kind of device."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from accelerate.config.enums import DistributedType, RNGType


@dataclass(frozen=True)
class Device:
    """One kind of device. The methods work for devices whose torch module follows the shape of `torch.cuda`.

    No method is a collective.

    Attributes:
        distributed_type: how several processes on such devices cooperate by default.
        backends: names of `torch.distributed` backends, the preferred one first.
        rng_type: the random generator type for synchronisation; None if it has none.
        usable: says whether a device of this kind is present; imports an installed package at most.
        visible_env: the environment variable that hides devices, if there is one.
        shareable: several processes may use one device through the preferred backend.
    """

    type: str
    distributed_type: DistributedType
    backends: tuple[str, ...]
    rng_type: RNGType | None
    usable: Callable[[], bool]
    visible_env: str | None = None
    shareable: bool = False

    def available(self) -> bool:
        """Return whether this machine has such a device; asks again at every call."""
        return bool(self.usable())

    def backend(self) -> str:
        """Return the first backend that this torch has, else the preferred one, whose error then says what is missing."""
        return next(filter(dist.is_backend_available, self.backends), self.backends[0])

    def namespace(self) -> ModuleType:
        """Return torch's module for the device, such as `torch.cuda`."""
        module = getattr(torch, self.type, None)
        return module if module is not None else importlib.import_module(f"torch.{self.type}")

    def count(self) -> int:
        """Return how many devices this process sees."""
        return self.namespace().device_count()

    def torch_device(self, index: int) -> torch.device:
        """Return device number `index`, wrapped around where there are fewer devices."""
        return torch.device(self.type, index % max(self.count(), 1))

    def set(self, index: int) -> None:
        """Make device number `index` the current one of this process."""
        self.namespace().set_device(index)

    def current(self) -> torch.device:
        """Return the current device of this process."""
        return torch.device(self.type, self.namespace().current_device())

    def synchronize(self) -> None:
        """Wait until the device has done everything that was asked of it."""
        self.namespace().synchronize()

    def empty_cache(self) -> None:
        """Give cached, unused memory back, where the module has a call for that: torch does not ask for one."""
        getattr(self.namespace(), "empty_cache", lambda: None)()

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""
        self.namespace().manual_seed_all(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the current device's generator, as uint8 on the CPU."""
        return self.namespace().get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the current device's generator."""
        self.namespace().set_rng_state(state)

    def get_rng_state_all(self) -> Any:
        """Return the states of the generators of all devices, in the form that `set_rng_state_all` takes."""
        module = self.namespace()
        if hasattr(module, "get_rng_state_all"):
            return module.get_rng_state_all()
        # torch requires no such call of the module of an added device.
        return [module.get_rng_state(torch.device(self.type, index)) for index in range(self.count())]

    def set_rng_state_all(self, states: Any) -> None:
        """Set the states of the generators of all devices."""
        module = self.namespace()
        if hasattr(module, "set_rng_state_all"):
            module.set_rng_state_all(states)
        else:
            for index, state in enumerate(states):
                module.set_rng_state(state, torch.device(self.type, index))


class Lone(Device):
    """A kind of device with one device per process, without an index."""

    def torch_device(self, index: int) -> torch.device:
        """Return the device; there is only one."""
        return torch.device(self.type)

    def set(self, index: int) -> None:
        """Do nothing: there is nothing to choose."""

    def current(self) -> torch.device:
        """Return the device."""
        return torch.device(self.type)
