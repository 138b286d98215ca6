"""Checks for installed libraries and available hardware that import only what the answer needs.

Importing this module imports neither torch nor any optional library. An installed library is looked up once. A missing
library is looked up again, because a notebook may install it. Accelerators that need a vendor's plugin are looked up once
per process (each function has its own `cache_clear`). CUDA and MPS are asked every time, because tests and notebooks
hide and show devices.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.base.environment import parse_flag_from_env, patch_environment
from accelerate.base.versions import compare_versions, is_torch_version

T = TypeVar("T", bound=Callable[..., Any])

# Read once: torch_xla takes the device as soon as it is imported, so changing one's mind later has no effect.
USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", True)


_found: set[tuple[str, ...]] = set()


def is_installed(package: str, *distributions: str) -> bool:
    """Tell whether a package can be imported and comes from one of these distributions, by default the one of its name.

    A folder of the same name in the working directory belongs to no distribution.
    """
    key = (package, *distributions)
    if key in _found:
        return True
    for distribution in (distributions or (package,)) if importlib.util.find_spec(package) is not None else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(distribution)
            _found.add(key)
            return True
    return False


def library(
    name: str, *distributions: str, package: str | None = None, at_least: str | None = None
) -> Callable[[], bool]:
    """Return `is_<name>_available` for a library; the other arguments are those of `is_installed`, by default the name."""
    package = package or name

    def available() -> bool:
        installed = is_installed(package, *distributions)
        return installed and (at_least is None or compare_versions(package, ">=", at_least))

    available.__name__ = available.__qualname__ = f"is_{name}_available"
    available.__doc__ = f"Tell whether the library {package} is installed."
    return available


# Libraries

is_msamp_available = library("msamp", "ms-amp")
is_deepspeed_available = library("deepspeed")
is_transformers_available = library("transformers")
is_torchdata_stateful_dataloader_available = library(
    "torchdata_stateful_dataloader", package="torchdata", at_least="0.8.0"
)
is_torchao_available = library("torchao", at_least="0.6.1")
is_8bit_bnb_available = library("8bit_bnb", package="bitsandbytes", at_least="0.37.2")
is_4bit_bnb_available = library("4bit_bnb", package="bitsandbytes", at_least="0.39.0")
is_wandb_available = library("wandb")
is_comet_ml_available = library("comet_ml")
is_mlflow_available = library("mlflow", "mlflow", "mlflow-skinny")
is_clearml_available = library("clearml")
is_dvclive_available = library("dvclive")
is_swanlab_available = library("swanlab")
is_trackio_available = library("trackio")


# Parts of torch


def is_torch_distributed_available() -> bool:
    """Tell whether torch was built with `torch.distributed`."""
    import torch

    return torch.distributed.is_available()


# Hardware


def is_cuda_available() -> bool:
    """Tell whether a CUDA GPU is available, through NVML, so that processes can still be forked afterwards."""
    import torch

    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Tell whether the GPU of an Apple computer can be used, with torch `min_version` or later."""
    import torch

    return is_torch_version(">=", min_version) and torch.backends.mps.is_built() and torch.backends.mps.is_available()


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


# Precision


def is_fp8_available() -> bool:
    """Tell whether a library for training in 8-bit floating point is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_transformer_engine_available() -> bool:
    """Tell whether Transformer Engine, or Intel's version of it on a Gaudi, is installed."""
    return is_installed("intel_transformer_engine" if is_hpu_available() else "transformer_engine")


@functools.cache
def is_transformer_engine_mxfp8_available() -> bool:
    """Tell whether Transformer Engine is installed and the GPU has MXFP8 block scaling."""
    if not is_installed("transformer_engine"):
        return False
    return bool(importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


# Libraries with a condition


def is_rich_available() -> bool:
    """Tell whether rich is installed and wanted (ACCELERATE_ENABLE_RICH). Not a collective."""
    return is_installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_aim_available() -> bool:
    """Tell whether Aim 3 is installed; Aim 4 has another interface."""
    return is_installed("aim") and compare_versions("aim", "<", "4.0.0")


def is_tensorboard_available() -> bool:
    """Tell whether TensorBoard or tensorboardX is installed."""
    return is_installed("tensorboard", "tensorboard", "tb-nightly") or is_installed("tensorboardX")
