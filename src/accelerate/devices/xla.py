"""XLA devices (TPUs, and GPUs through torch_xla). torch_xla is imported only when one of these methods is called."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from accelerate.config.enums import DistributedType, RNGType
from accelerate.devices.base import Device
from accelerate.utils.imports import is_torch_xla_available


def _model() -> ModuleType:
    return importlib.import_module("torch_xla.core.xla_model")


def _runtime() -> ModuleType:
    return importlib.import_module("torch_xla.runtime")


@dataclass(frozen=True)
class Xla(Device):
    """A device whose operations are recorded and compiled; ranks come from its runtime."""

    def namespace(self) -> ModuleType:
        """Return `torch_xla.core.xla_model`."""
        return _model()

    def count(self) -> int:
        """Return how many devices this process addresses."""
        return _runtime().addressable_device_count()

    def torch_device(self, index: int) -> torch.device:
        """Return the device that the runtime gave this process."""
        return _model().xla_device()

    def set(self, index: int) -> None:
        """Do nothing: the runtime binds a process to its device."""

    def current(self) -> torch.device:
        """Return the device that the runtime gave this process."""
        return _model().xla_device()

    def synchronize(self) -> None:
        """Run what was recorded and wait for it."""
        _model().mark_step()
        _model().wait_device_ops()

    def empty_cache(self) -> None:
        """Do nothing: XLA manages its memory."""

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        _model().set_rng_state(seed)

    def get_rng_state(self) -> Any:
        """Return the state of the device's generator, an integer."""
        return _model().get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        """Set the state of the device's generator, an integer."""
        _model().set_rng_state(int(state))

    get_rng_state_all = get_rng_state
    set_rng_state_all = set_rng_state

    def bf16_supported(self) -> bool:
        """Return True: XLA devices compute in bfloat16."""
        return True

    def ranks(self) -> tuple[int, int, int]:
        """Return rank, world size and local rank as the runtime says."""
        runtime = _runtime()
        return runtime.global_ordinal(), runtime.world_size(), runtime.local_ordinal()


XLA = Xla("xla", DistributedType.XLA, ("xla",), RNGType.XLA, lambda: is_torch_xla_available(), None)
