"""One row per kind of device, in the order in which a machine is searched for one."""

import functools
from types import ModuleType
from typing import Any

import torch

from accelerate.config.enums import DistributedType, RNGType
from accelerate.devices.base import Device
from accelerate.devices.xla import XLA
from accelerate.utils import imports


class Cpu(Device):
    """The processor: always there, one of it, shared by all processes."""

    def namespace(self) -> ModuleType:
        """Return `torch.cpu`."""
        return torch.cpu

    def count(self) -> int:
        """Return 1: torch does not tell processors apart."""
        return 1

    def torch_device(self, index: int) -> torch.device:
        """Return the device; the index of a processor means nothing."""
        return torch.device("cpu")

    def set(self, index: int) -> None:
        """Do nothing: there is nothing to choose."""

    def current(self) -> torch.device:
        """Return the device."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Do nothing: the processor computes at once."""

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

    def bf16_supported(self) -> bool:
        """Return True: every processor computes in bfloat16, if slowly."""
        return True


class Mps(Device):
    """Apple's GPU: one device, one generator, no collectives."""

    def count(self) -> int:
        """Return 1, or 0 where there is none."""
        return int(self.available())

    def torch_device(self, index: int) -> torch.device:
        """Return the device; there is only one."""
        return torch.device("mps")

    def set(self, index: int) -> None:
        """Do nothing: there is nothing to choose."""

    def current(self) -> torch.device:
        """Return the device."""
        return torch.device("mps")

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        torch.mps.manual_seed(seed)

    def get_rng_state_all(self) -> torch.Tensor:
        """Return the state of the device's generator."""
        return torch.mps.get_rng_state()

    def set_rng_state_all(self, states: torch.Tensor) -> None:
        """Set the state of the device's generator."""
        torch.mps.set_rng_state(states)

    def bf16_supported(self) -> bool:
        """Say whether the system is new enough for bfloat16 on the device (macOS 14)."""
        return torch.backends.mps.is_macos_or_newer(14, 0)


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


_T, _R = DistributedType, RNGType


def _with_device(probe: Any) -> Any:
    return functools.partial(probe, check_device=True)


# Vendor plug-ins come before CUDA: some of them pose as CUDA devices once they are loaded.
DEVICES: dict[str, Device] = {
    row.type: row
    for row in (
        XLA,
        Device("mlu", _T.MULTI_MLU, ("cncl",), _R.MLU, _with_device(imports.is_mlu_available), "MLU_VISIBLE_DEVICES"),
        Device("sdaa", _T.MULTI_SDAA, ("tccl",), _R.SDAA, _with_device(imports.is_sdaa_available)),
        Device(
            "musa", _T.MULTI_MUSA, ("mccl",), _R.MUSA, _with_device(imports.is_musa_available), "MUSA_VISIBLE_DEVICES"
        ),
        Device(
            "npu", _T.MULTI_NPU, ("hccl",), _R.NPU, _with_device(imports.is_npu_available), "ASCEND_RT_VISIBLE_DEVICES"
        ),
        Hpu("hpu", _T.MULTI_HPU, ("hccl",), _R.HPU, lambda: imports.is_hpu_available(init_hccl=False)),
        Device(
            "neuron",
            _T.MULTI_NEURON,
            ("neuron",),
            _R.NEURON,
            _with_device(imports.is_neuron_available),
            "NEURON_RT_VISIBLE_CORES",
        ),
        Device("cuda", _T.MULTI_GPU, ("nccl", "gloo"), _R.CUDA, torch.cuda.is_available, "CUDA_VISIBLE_DEVICES"),
        Device(
            "xpu",
            _T.MULTI_XPU,
            ("xccl", "ccl", "gloo"),
            _R.XPU,
            _with_device(imports.is_xpu_available),
            "ZE_AFFINITY_MASK",
        ),
        Mps("mps", _T.NO, (), None, lambda: torch.backends.mps.is_available()),
        Cpu("cpu", _T.MULTI_CPU, ("gloo", "mpi"), None, lambda: True, shareable=True),
    )
}
