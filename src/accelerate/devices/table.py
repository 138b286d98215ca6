"""The kinds of devices: the interface of a device, a row for each kind, and the search for this machine's kind.

A vendor's package is imported only when a method of its row is called.
"""

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from accelerate.base import imports
from accelerate.base.environment import parse_flag_from_env
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


class Tpu(Device):
    """Google's TPU by torch's native backend, which gives each process one chip under the index 0."""

    def torch_device(self, index: int) -> torch.device:
        """Return the device that the backend gave this process."""
        return self.current()

    def set(self, index: int) -> None:
        """Do nothing: the backend binds a process to its chip."""


class Hpu(Device):
    """Intel Gaudi: processes get their device from the runtime, and the module has no cache to empty."""

    def set(self, index: int) -> None:
        """Do nothing unless there are several devices to choose from: the runtime binds a process to its device."""
        if self.count() > 1:
            super().set(index)

    def empty_cache(self) -> None:
        """Do nothing: Gaudi has no such call."""

    def manual_seed_all(self, seed: int) -> None:
        """Seed all devices."""
        self.namespace().random.manual_seed_all(seed)

    def get_rng_state_all(self) -> Any:
        """Return the states of all generators."""
        return self.namespace().random.get_rng_state_all()

    def set_rng_state_all(self, states: Any) -> None:
        """Set the states of all generators."""
        self.namespace().random.set_rng_state_all(states)


@dataclass(frozen=True)
class Xla(Device):
    """A device whose operations are recorded and compiled; ranks come from its runtime."""

    def namespace(self) -> ModuleType:
        """Return `torch_xla.core.xla_model`."""
        return importlib.import_module("torch_xla.core.xla_model")

    def count(self) -> int:
        """Return how many devices this process addresses."""
        return importlib.import_module("torch_xla.runtime").addressable_device_count()

    def torch_device(self, index: int) -> torch.device:
        """Return the device that the runtime gave this process."""
        return self.current()

    def set(self, index: int) -> None:
        """Do nothing: the runtime binds a process to its device."""

    def current(self) -> torch.device:
        """Return the device that the runtime gave this process."""
        return self.namespace().xla_device()

    def synchronize(self) -> None:
        """Run the recorded operations and wait for them."""
        self.namespace().mark_step()
        self.namespace().wait_device_ops()

    def empty_cache(self) -> None:
        """Do nothing: XLA manages its memory."""

    def set_rng_state(self, state: Any) -> None:
        """Set the state of the device's generator, an integer."""
        self.namespace().set_rng_state(int(state))

    manual_seed_all = set_rng_state
    get_rng_state_all = Device.get_rng_state
    set_rng_state_all = set_rng_state

    def ranks(self) -> tuple[int, int, int]:
        """Return rank, world size and local rank as the runtime says."""
        runtime = importlib.import_module("torch_xla.runtime")
        return runtime.global_ordinal(), runtime.world_size(), runtime.local_ordinal()


_T, _R = DistributedType, RNGType


def _vendor(name: str, backends: tuple[str, ...], visible_env: str | None = None) -> Device:
    """Return the row of a device whose names follow from one another."""
    probe = functools.partial(getattr(imports, f"is_{name}_available"), check_device=True)
    return Device(name, _T[f"MULTI_{name.upper()}"], backends, _R(name), probe, visible_env)


# Vendor plug-ins come before CUDA: some of them pose as CUDA devices once they are loaded. torch's native TPU backend has no kind of
# its own among the recorded ones, nor a word for its generator: it cooperates as GPUs do.
DEVICES: dict[str, Device] = {
    row.type: row
    for row in (
        Xla("xla", _T.XLA, ("xla",), _R.XLA, imports.is_torch_xla_available),
        Tpu("tpu", _T.MULTI_GPU, ("tpu_dist",), None, lambda: imports.has_device("torch_tpu", "tpu")),
        _vendor("mlu", ("cncl",), "MLU_VISIBLE_DEVICES"),
        _vendor("sdaa", ("tccl",)),
        _vendor("musa", ("mccl",), "MUSA_VISIBLE_DEVICES"),
        _vendor("npu", ("hccl",), "ASCEND_RT_VISIBLE_DEVICES"),
        Hpu("hpu", _T.MULTI_HPU, ("hccl",), _R.HPU, lambda: imports.is_hpu_available(init_hccl=False)),
        _vendor("neuron", ("neuron",), "NEURON_RT_VISIBLE_CORES"),
        Device("cuda", _T.MULTI_GPU, ("nccl", "gloo"), _R.CUDA, torch.cuda.is_available, "CUDA_VISIBLE_DEVICES"),
        _vendor("xpu", ("xccl", "ccl", "gloo"), "ZE_AFFINITY_MASK"),
        Mps("mps", _T.NO, (), None, lambda: torch.backends.mps.is_available()),
        Cpu("cpu", _T.MULTI_CPU, ("gloo", "mpi"), None, lambda: True, shareable=True),
    )
}
# The public document that the names of each row come from.
SOURCES = {
    **dict.fromkeys(("cuda", "xpu", "cpu"), "https://docs.pytorch.org/docs/stable/distributed.html"),
    "mps": "https://docs.pytorch.org/docs/stable/mps.html",
    "xla": "https://github.com/pytorch/xla",
    "tpu": "https://docs.cloud.google.com/tpu/docs/pytorch-on-tpu",
    "mlu": "https://github.com/deepspeedai/DeepSpeed/blob/master/accelerator/mlu_accelerator.py",
    "sdaa": "https://github.com/deepspeedai/DeepSpeed/blob/master/accelerator/sdaa_accelerator.py",
    "musa": "https://github.com/MooreThreads/torch_musa",
    "npu": "https://www.hiascend.com/doc_center/source/zh/Pytorch/700/apiref/apilist/ptaoplist_001442.html",
    "hpu": "https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Distributed_Backend_Initialization.html",
    "neuron": "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/index.html",
}


# Which one this machine has ------------------------------------------------------------------------------------------


@functools.cache
def _search() -> Device:
    for device in DEVICES.values():
        # torch_xla may be installed only for its compiler; ACCELERATE_USE_XPU=false and the like hide an XPU.
        left_out = device.type == "xpu" and not parse_flag_from_env("ACCELERATE_USE_XPU", True)
        if not left_out and device.available():
            return device
    return DEVICES["cpu"]


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
