"""Which devices are available, and which numbers they compute with. Importing this module imports neither torch nor a plug-in.

A device that needs a vendor's plug-in is looked up once per process; each function has its own `cache_clear`. CUDA and MPS are asked
every time, because tests and notebooks hide and show devices.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable

from accelerate.base.environment import parse_flag_from_env, patch_environment
from accelerate.base.versions import is_torch_version

# Read once: torch_xla takes the device when it is imported, so a later change of the variable has no effect.
USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", True)


def is_cuda_available() -> bool:
    """Tell whether a CUDA GPU is available, through NVML, so that processes can still be forked afterwards."""
    import torch

    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Tell whether the GPU of an Apple computer can be used, with torch `min_version` or later."""
    import torch

    return is_torch_version(">=", min_version) and torch.backends.mps.is_built() and torch.backends.mps.is_available()


def is_rocm_available() -> bool:
    """Tell whether the GPU that torch sees as CUDA is an AMD one."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def has_device(plugin: str | None, name: str, check_device: bool = True) -> bool:
    """Tell whether torch has a device module, after importing the plugin that brings it, and whether it is usable."""
    if plugin is not None:
        if importlib.util.find_spec(plugin) is None:
            return False
        importlib.import_module(plugin)
    import torch

    module = getattr(torch, name, None)
    if module is None:
        return False
    if check_device:
        try:
            module.device_count()
        except RuntimeError:
            return False
    return bool(module.is_available())


def _accelerator(name: str, plugin: str | None = None) -> Callable[..., bool]:
    """Return `is_<name>_available` for a device that torch, or a vendor's plugin, brings as the module `torch.<name>`."""

    def available(check_device: bool = False) -> bool:
        return has_device(plugin, name, check_device)

    available.__name__ = available.__qualname__ = f"is_{name}_available"
    available.__doc__ = f"Tell whether torch.{name} has a device; `check_device` also makes it answer."
    return functools.cache(available)


is_xpu_available = _accelerator("xpu")
is_npu_available = _accelerator("npu", "torch_npu")
is_mlu_available = _accelerator("mlu", "torch_mlu")
is_musa_available = _accelerator("musa", "torch_musa")
is_sdaa_available = _accelerator("sdaa", "torch_sdaa")
is_neuron_available = _accelerator("neuron", "torch_neuronx")


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Tell whether an Intel Gaudi and its torch bridge are there; `init_hccl` also registers its "hccl" backend."""
    if any(importlib.util.find_spec(name) is None for name in ("habana_frameworks", "habana_frameworks.torch")):
        return False
    available = has_device("habana_frameworks.torch", "hpu", check_device=False)
    if available and init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return available


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Tell whether torch_xla is installed and wanted (USE_TORCH_XLA, on unless set to 0).

    Args:
        check_is_tpu: ask for a TPU behind it.
        check_is_gpu: ask for a GPU behind it.

    Raises:
        ValueError: both were requested.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu and check_is_gpu cannot both be true; a device is one or the other.")
    if not USE_TORCH_XLA or importlib.util.find_spec("torch_xla") is None:
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind in (("GPU", "CUDA") if check_is_gpu else ("TPU",))


def is_xccl_available() -> bool:
    """Tell whether torch can communicate between Intel GPUs through XCCL."""
    import torch

    return torch.distributed.is_xccl_available()


def is_habana_gaudi1() -> bool:
    """Tell whether the device is a Gaudi of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    device = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return device._get_device_type() == device.synDeviceType.synDeviceGaudi


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Tell whether the device of this machine computes in bfloat16; `ignore_tpu` says no for a TPU."""
    import torch

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_cuda_available():
        return torch.cuda.is_bf16_supported()
    if is_mlu_available():
        return torch.mlu.is_bf16_supported()
    if is_xpu_available():
        return getattr(torch.xpu, "is_bf16_supported", lambda: True)()  # not in every torch that we support
    return not is_mps_available() or torch.backends.mps.is_macos_or_newer(14, 0)


def is_fp16_available() -> bool:
    """Tell whether the device of this machine computes in float16."""
    return not is_habana_gaudi1()
