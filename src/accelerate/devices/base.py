"""What the package asks of a kind of device."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from accelerate.config.enums import DistributedType, RNGType


@dataclass(frozen=True)
class Device:
    """One kind of device.

    The methods of this class serve a device whose torch module follows the shape of `torch.cuda`; rows that differ
    subclass it.

    Args:
        type: torch's name of the device.
        distributed_type: how several processes on such devices cooperate by default.
        backends: names of `torch.distributed` backends, the preferred one first.
        rng_type: which random generator synchronisation concerns it; None if it has none of its own.
        usable: says whether a device of this kind is present; may import a vendor's package, but only an installed one.
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
        """Say whether this machine has such a device; asks anew at every call."""
        return bool(self.usable())

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
        """Give cached, unused memory back."""
        self.namespace().empty_cache()

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
        return self.namespace().get_rng_state_all()

    def set_rng_state_all(self, states: Any) -> None:
        """Set the states of the generators of all devices."""
        self.namespace().set_rng_state_all(states)

    def bf16_supported(self) -> bool:
        """Say whether the device computes in bfloat16."""
        check = getattr(self.namespace(), "is_bf16_supported", None)
        return True if check is None else bool(check())
