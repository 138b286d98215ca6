"""The kinds of devices, a row for each, and the search for this machine's kind. Extensions offer rows for those of vendors."""

import functools
import os

import torch

from accelerate.base.environment import parse_flag_from_env
from accelerate.config.enums import DistributedType, RNGType
from accelerate.devices.device import Device, Lone
from accelerate.extension import imported, specs


class Cpu(Lone):
    """The processor: always there, one of it, shared by all processes."""

    def empty_cache(self) -> None:
        """Do nothing: torch caches no host memory."""

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's default generator."""
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of torch's default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of torch's default generator."""
        torch.set_rng_state(state)

    get_rng_state_all = get_rng_state
    set_rng_state_all = set_rng_state


class Mps(Lone):
    """Apple's GPU: one device, one generator, no collectives."""

    def count(self) -> int:
        """Return 1, or 0 where there is none."""
        return int(self.available())

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        torch.mps.manual_seed(seed)

    get_rng_state_all = Device.get_rng_state
    set_rng_state_all = Device.set_rng_state


_OWN = (
    Device(
        "cuda",
        DistributedType.MULTI_GPU,
        ("nccl", "gloo"),
        RNGType.CUDA,
        torch.cuda.is_available,
        "CUDA_VISIBLE_DEVICES",
    ),
    Mps("mps", DistributedType.NO, (), None, lambda: torch.backends.mps.is_available()),
    Cpu("cpu", DistributedType.MULTI_CPU, ("gloo", "mpi"), None, lambda: True, shareable=True),
)
# Vendors' plug-ins come before CUDA: some of them pose as CUDA devices once they are loaded.
_ADDED = [device for spec in specs() if spec.devices for device in imported(spec.devices)]
DEVICES: dict[str, Device] = {device.type: device for device in (*_ADDED, *_OWN)}
# The public document that the names of each row come from.
SOURCES = {
    **dict.fromkeys(("cuda", "cpu"), "https://docs.pytorch.org/docs/stable/distributed.html"),
    "mps": "https://docs.pytorch.org/docs/stable/mps.html",
}


# Which one this machine has ------------------------------------------------------------------------------------------


@functools.cache
def _search() -> Device:
    return next(device for device in DEVICES.values() if device.available())


def detect(cpu: bool = False) -> Device:
    """Return the kind of device that this process computes on; the search runs once."""
    if cpu or parse_flag_from_env("ACCELERATE_USE_CPU", False):
        return DEVICES["cpu"]
    device_name = os.environ.get("ACCELERATE_TORCH_DEVICE", "").strip()
    return row(device_name) if device_name else _search()


def forget() -> None:
    """Search again at the next `detect`; for tests, and after devices were hidden or shown."""
    _search.cache_clear()


def register(device: Device) -> None:
    """Add a kind of device that this table does not have, or replace its row; it is looked for before the others.

    Not a collective.

    Example:
        >>> from accelerate.devices import DEVICES, Device, register
        >>> from accelerate.utils import DistributedType
        >>> register(Device("oven", DistributedType.MULTI_GPU, ("gloo",), None, usable=lambda: False))
        >>> DEVICES.pop("oven").backends
        ('gloo',)
    """
    others = {name: other for name, other in DEVICES.items() if name != device.type}
    DEVICES.clear()
    DEVICES.update({device.type: device, **others})
    forget()


def row(device_type: str) -> Device:
    """Return the row of a kind of device, such as "cuda:1"; ValueError lists the known ones."""
    name = str(device_type).partition(":")[0]
    if name not in DEVICES:
        raise ValueError(f"The device {str(device_type)!r} is not known; choose one of {', '.join(sorted(DEVICES))}.")
    return DEVICES[name]
