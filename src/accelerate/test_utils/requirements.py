"""Decorators that skip a test where something it needs is missing.

Each takes a test function or a test class and returns it, skipped or not; what is there is looked up when the decorator
runs, not when this module is imported.
"""

import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.devices import probe
from accelerate.utils import imports
from accelerate.utils.environment import parse_flag_from_env
from accelerate.utils.versions import compare_versions, is_torch_version

T = TypeVar("T")
Decorator = Callable[[Any], Any]


def skip(test_case: T) -> T:
    """Skip a test always."""
    return unittest.skip("The test is switched off")(test_case)


def slow(test_case: T) -> T:
    """Skip a slow test, unless the environment variable RUN_SLOW says otherwise."""
    return unittest.skipUnless(parse_flag_from_env("RUN_SLOW", default=False), "The test is slow; RUN_SLOW=1 runs it")(
        test_case
    )


def run_first(test_case: T) -> T:
    """Run a test before all others, where the plugin pytest-order is installed."""
    try:
        import pytest
    except ImportError:
        return test_case
    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test where torch is older than a version.

    Args:
        test_case: the test; None returns a decorator.
        version: the version.

    Example:
        >>> @require_torch_min_version(version="2.6.0")
        ... def test_something(): ...
    """
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    return unittest.skipUnless(is_torch_version(">=", version), f"The test needs torch {version} or newer")(test_case)


def _requirement(name: str, needs: str, holds: Callable[[], bool]) -> Decorator:
    def decorate(test_case: Any) -> Any:
        return unittest.skipUnless(holds(), f"The test needs {needs}")(test_case)

    decorate.__name__ = decorate.__qualname__ = name
    decorate.__doc__ = f"Skip a test where this is missing: {needs}."
    return decorate


def _count() -> int:
    return 0 if torch_device == "cpu" else device_count


def _is(*types: str) -> Callable[[], bool]:
    return lambda: torch_device in types


def _several(*types: str) -> Callable[[], bool]:
    return lambda: (not types or torch_device in types) and _count() > 1


def _single(*types: str) -> Callable[[], bool]:
    return lambda: (not types or torch_device in types) and _count() == 1


def _has_tracker() -> bool:
    trackers = (imports.is_wandb_available, imports.is_tensorboard_available, imports.is_trackio_available)
    return any(found() for found in trackers) and not imports.is_comet_ml_available()


def _has_tensor_parallelism() -> bool:
    return imports.is_transformers_available() and compare_versions("transformers", ">=", "4.52.0")


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return what tests run on: the device, how many there are, and a function that says how much memory is in use.

    Returns:
        The name of the device, its count (1 for the CPU), and a function that returns bytes (always 0 where nobody counts
        them).
    """
    device = "xla" if imports.is_torch_xla_available() else probe.detect().type
    if device in ("cpu", "xla"):
        return device, 1, lambda: 0
    row = probe.row(device)
    used = getattr(row.namespace(), "memory_allocated", None) or getattr(
        row.namespace(), "current_allocated_memory", lambda: 0
    )
    return device, row.count(), used


torch_device, device_count, memory_allocated_func = get_backend()

# Devices
require_cpu = _requirement("require_cpu", "a machine without other devices than the CPU", _is("cpu"))
require_non_cpu = _requirement("require_non_cpu", "a device other than the CPU", lambda: torch_device != "cpu")
require_cuda = _requirement("require_cuda", "a GPU that CUDA or ROCm can use", _is("cuda"))
require_xpu = _requirement("require_xpu", "an Intel XPU", _is("xpu"))
require_non_xpu = _requirement("require_non_xpu", "a machine without an XPU", lambda: torch_device != "xpu")
require_hpu = _requirement("require_hpu", "a Gaudi HPU", _is("hpu"))
require_non_hpu = _requirement("require_non_hpu", "a machine without an HPU", lambda: torch_device != "hpu")
require_npu = _requirement("require_npu", "an Ascend NPU", _is("npu"))
require_mlu = _requirement("require_mlu", "a Cambricon MLU", _is("mlu"))
require_sdaa = _requirement("require_sdaa", "a Tecorigin SDAA", _is("sdaa"))
require_musa = _requirement("require_musa", "a Moore Threads MUSA", _is("musa"))
require_mps = _requirement("require_mps", "Apple's MPS", _is("mps"))
require_neuron = _requirement("require_neuron", "AWS Neuron cores", _is("neuron"))
require_tpu = _requirement("require_tpu", "a TPU", lambda: imports.is_torch_xla_available(check_is_tpu=True))
require_non_torch_xla = _requirement(
    "require_non_torch_xla", "an environment without torch_xla", lambda: not imports.is_torch_xla_available()
)
require_cuda_or_xpu = _requirement("require_cuda_or_xpu", "a GPU or an XPU", _is("cuda", "xpu"))
require_cuda_or_hpu = _requirement("require_cuda_or_hpu", "a GPU or an HPU", _is("cuda", "hpu"))
require_single_device = _requirement("require_single_device", "exactly one device besides the CPU", _single())
require_single_gpu = _requirement("require_single_gpu", "exactly one GPU", _single("cuda"))
require_single_xpu = _requirement("require_single_xpu", "exactly one XPU", _single("xpu"))
require_multi_device = _requirement("require_multi_device", "several devices", _several())
require_multi_gpu = _requirement("require_multi_gpu", "several GPUs", _several("cuda"))
require_multi_xpu = _requirement("require_multi_xpu", "several XPUs", _several("xpu"))
require_multi_gpu_or_xpu = _requirement("require_multi_gpu_or_xpu", "several GPUs or XPUs", _several("cuda", "xpu"))

# Precision
require_fp16 = _requirement("require_fp16", "a device that computes in fp16", imports.is_fp16_available)
require_fp8 = _requirement("require_fp8", "a library for FP8 training", imports.is_fp8_available)
require_transformer_engine = _requirement(
    "require_transformer_engine", "Transformer Engine", imports.is_transformer_engine_available
)
require_transformer_engine_mxfp8 = _requirement(
    "require_transformer_engine_mxfp8",
    "Transformer Engine with MXFP8",
    imports.is_transformer_engine_mxfp8_available,
)
require_torchao = _requirement("require_torchao", "torchao", imports.is_torchao_available)
require_bnb = _requirement("require_bnb", "bitsandbytes", imports.is_bnb_available)

# Ways of training
require_deepspeed = _requirement("require_deepspeed", "DeepSpeed", imports.is_deepspeed_available)
require_fsdp2 = _requirement("require_fsdp2", "torch 2.6 or newer", lambda: is_torch_version(">=", "2.6.0"))
require_tp = _requirement("require_tp", "transformers 4.52 or newer", _has_tensor_parallelism)
require_pippy = _requirement("require_pippy", "torch's pipeline parallelism", imports.is_pippy_available)
require_schedulefree = _requirement("require_schedulefree", "schedulefree", imports.is_schedulefree_available)
require_triton = _requirement("require_triton", "Triton", imports.is_triton_available)

# Libraries of models and data
require_transformers = _requirement("require_transformers", "transformers", imports.is_transformers_available)
require_datasets = _requirement("require_datasets", "datasets", imports.is_datasets_available)
require_huggingface_suite = _requirement(
    "require_huggingface_suite",
    "transformers and datasets",
    lambda: imports.is_transformers_available() and imports.is_datasets_available(),
)
require_peft = _requirement("require_peft", "peft", imports.is_peft_available)
require_timm = _requirement("require_timm", "timm", imports.is_timm_available)
require_torchvision = _requirement("require_torchvision", "torchvision", imports.is_torchvision_available)
require_torchdata_stateful_dataloader = _requirement(
    "require_torchdata_stateful_dataloader",
    "torchdata with StatefulDataLoader",
    imports.is_torchdata_stateful_dataloader_available,
)
require_pandas = _requirement("require_pandas", "pandas", imports.is_pandas_available)
require_matplotlib = _requirement("require_matplotlib", "matplotlib", imports.is_matplotlib_available)
require_import_timer = _requirement("require_import_timer", "tuna", imports.is_import_timer_available)

# Trackers
require_aim = _requirement("require_aim", "aim", imports.is_aim_available)
require_clearml = _requirement("require_clearml", "clearml", imports.is_clearml_available)
require_comet_ml = _requirement("require_comet_ml", "comet_ml", imports.is_comet_ml_available)
require_dvclive = _requirement("require_dvclive", "dvclive", imports.is_dvclive_available)
require_mlflow = _requirement("require_mlflow", "mlflow", imports.is_mlflow_available)
require_swanlab = _requirement("require_swanlab", "swanlab", imports.is_swanlab_available)
require_tensorboard = _requirement("require_tensorboard", "tensorboard", imports.is_tensorboard_available)
require_trackio = _requirement("require_trackio", "trackio", imports.is_trackio_available)
require_wandb = _requirement("require_wandb", "wandb", imports.is_wandb_available)
require_trackers = _requirement("require_trackers", "a tracker, and no comet_ml beside it", _has_tracker)

__all__ = ["device_count", "get_backend", "memory_allocated_func", "run_first", "skip", "slow", "torch_device"]
__all__ += [name for name in globals() if name.startswith("require_")]
