"""The rows of vendors' devices, and the classes of those that differ from `torch.cuda`.

A vendor's package is imported only when a method of its row is called.
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from accelerate.base.environment import parse_flag_from_env
from accelerate.config.enums import DistributedType, RNGType
from accelerate.devices.device import Device
from accelerate.extensions.vendor_devices import available


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

    def backend(self) -> str:
        """Return "hccl", which the vendor's module registers."""
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
        return super().backend()

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
    probe = functools.partial(getattr(available, f"is_{name}_available"), check_device=True)
    return Device(name, _T[f"MULTI_{name.upper()}"], backends, _R(name), probe, visible_env)


def _is_xpu_usable() -> bool:
    """Return whether there is an XPU that ACCELERATE_USE_XPU=false does not hide, and no CUDA device, which is preferred."""
    wanted = parse_flag_from_env("ACCELERATE_USE_XPU", True) and not torch.cuda.is_available()
    return wanted and available.is_xpu_available(check_device=True)


# Upstream has no DistributedType and no RNGType for torch's native TPU backend, so it uses those of GPUs and none.
# torch_xla comes first: packages of other vendors may install it.
ROWS = (
    Xla("xla", _T.XLA, ("xla",), _R.XLA, available.is_torch_xla_available),
    Tpu("tpu", _T.MULTI_GPU, ("tpu_dist",), None, lambda: available.has_device("torch_tpu", "tpu")),
    _vendor("mlu", ("cncl",), "MLU_VISIBLE_DEVICES"),
    _vendor("sdaa", ("tccl",)),
    _vendor("musa", ("mccl",), "MUSA_VISIBLE_DEVICES"),
    _vendor("npu", ("hccl",), "ASCEND_RT_VISIBLE_DEVICES"),
    Hpu("hpu", _T.MULTI_HPU, ("hccl",), _R.HPU, lambda: available.is_hpu_available(init_hccl=False)),
    _vendor("neuron", ("neuron",), "NEURON_RT_VISIBLE_CORES"),
    Device("xpu", _T.MULTI_XPU, ("xccl", "ccl", "gloo"), _R.XPU, _is_xpu_usable, "ZE_AFFINITY_MASK"),
)
# The public document that the names of each row come from.
SOURCES = {
    "xla": "https://github.com/pytorch/xla",
    "tpu": "https://docs.cloud.google.com/tpu/docs/pytorch-on-tpu",
    "mlu": "https://github.com/deepspeedai/DeepSpeed/blob/master/accelerator/mlu_accelerator.py",
    "sdaa": "https://github.com/deepspeedai/DeepSpeed/blob/master/accelerator/sdaa_accelerator.py",
    "musa": "https://github.com/MooreThreads/torch_musa",
    "npu": "https://www.hiascend.com/doc_center/source/zh/Pytorch/700/apiref/apilist/ptaoplist_001442.html",
    "hpu": "https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Distributed_Backend_Initialization.html",
    "neuron": "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/index.html",
    "xpu": "https://docs.pytorch.org/docs/stable/distributed.html",
}
