"""Decorators that skip a test if a requirement is missing.

Each takes a test function or a test class and returns it, skipped or not. The requirement is checked when the decorator
runs, not when this module is imported.
"""

import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.base import imports
from accelerate.base.environment import parse_flag_from_env
from accelerate.base.versions import compare_versions, is_torch_version
from accelerate.devices import table
from accelerate.extensions.compat import imports as others
from accelerate.extensions.fp8 import transformer_engine
from accelerate.extensions.trackers import available as trackers
from accelerate.extensions.vendor_devices import available as devices

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
    """Skip a test where torch is older than a version; without a test, return a decorator."""
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    return unittest.skipUnless(is_torch_version(">=", version), f"The test needs torch {version} or newer")(test_case)


def _requirement(name: str, needs: str, holds: Callable[[], bool]) -> Decorator:
    def decorate(test_case: Any) -> Any:
        return unittest.skipUnless(holds(), f"The test needs {needs}")(test_case)

    decorate.__name__ = decorate.__qualname__ = name
    decorate.__doc__ = f"Skip a test where this is missing: {needs}."
    return decorate


def _count(*types: str) -> int:
    """Return how many devices there are besides the CPU, of these types where they are named."""
    return device_count if torch_device in (types or {torch_device} - {"cpu"}) else 0


def _is(*types: str) -> Callable[[], bool]:
    return lambda: torch_device in types


def has_tracker() -> bool:
    """Tell whether a tracker is installed that works without an account."""
    checks = (trackers.is_wandb_available, trackers.is_tensorboard_available, trackers.is_trackio_available)
    return any(is_installed() for is_installed in checks)


def _has_tensor_parallelism() -> bool:
    return imports.is_transformers_available() and compare_versions("transformers", ">=", "4.52.0")


def _has_huggingface_suite() -> bool:
    return imports.is_transformers_available() and others.is_datasets_available()


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return what tests run on: the device, how many (1 for the CPU), and a function for the bytes in use, or 0."""
    device = "xla" if devices.is_torch_xla_available() else table.detect().type
    if device in ("cpu", "xla"):
        return device, 1, lambda: 0
    row = table.row(device)
    used = getattr(row.namespace(), "memory_allocated", None) or getattr(
        row.namespace(), "current_allocated_memory", lambda: 0
    )
    return device, row.count(), used


torch_device, device_count, memory_allocated_func = get_backend()

# The requirement in words, and its check, by the part of the name after "require_".
_DEVICES = {"cuda": "a GPU that CUDA or ROCm can use", "mps": "Apple's MPS", "neuron": "AWS Neuron cores"}
_DEVICES |= {"xpu": "an Intel XPU", "hpu": "a Gaudi HPU", "npu": "an Ascend NPU", "mlu": "a Cambricon MLU"}
_DEVICES |= {"sdaa": "a Tecorigin SDAA", "musa": "a Moore Threads MUSA", "cpu": "a machine without other devices"}
_NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    **{name: (words, _is(name)) for name, words in _DEVICES.items()},
    "non_cpu": ("a device other than the CPU", lambda: torch_device != "cpu"),
    "non_xpu": ("a machine without an XPU", lambda: torch_device != "xpu"),
    "non_hpu": ("a machine without an HPU", lambda: torch_device != "hpu"),
    "tpu": ("a TPU", lambda: devices.is_torch_xla_available(check_is_tpu=True)),
    "non_torch_xla": ("an environment without torch_xla", lambda: not devices.is_torch_xla_available()),
    "cuda_or_xpu": ("a GPU or an XPU", _is("cuda", "xpu")),
    "cuda_or_hpu": ("a GPU or an HPU", _is("cuda", "hpu")),
    "single_device": ("exactly one device besides the CPU", lambda: _count() == 1),
    "single_gpu": ("exactly one GPU", lambda: _count("cuda") == 1),
    "single_xpu": ("exactly one XPU", lambda: _count("xpu") == 1),
    "multi_device": ("several devices", lambda: _count() > 1),
    "multi_gpu": ("several GPUs", lambda: _count("cuda") > 1),
    "multi_xpu": ("several XPUs", lambda: _count("xpu") > 1),
    "multi_gpu_or_xpu": ("several GPUs or XPUs", lambda: _count("cuda", "xpu") > 1),
    "fsdp2": ("torch 2.6 or newer", lambda: True),
    "tp": ("transformers 4.52 or newer", _has_tensor_parallelism),
    "huggingface_suite": ("transformers and datasets", _has_huggingface_suite),
    "trackers": (
        "a tracker, and no comet_ml",
        lambda: has_tracker() and not trackers.is_comet_ml_available(),
    ),
}
# Requirements that `accelerate.utils.imports` checks by the same name.
_PACKAGES = (
    "fp16 fp8 transformer_engine transformer_engine_mxfp8 torchao bnb deepspeed pippy schedulefree triton "
    "transformers datasets peft timm torchvision torchdata_stateful_dataloader pandas matplotlib import_timer aim "
    "clearml comet_ml dvclive mlflow swanlab tensorboard trackio wandb"
)
_CHECKS = {**vars(imports), **vars(others), **vars(devices), **vars(trackers), **vars(transformer_engine)}
for _name in _PACKAGES.split():
    _NEEDS[_name] = (_name, _CHECKS[f"is_{_name}_available"])
for _name, (_words, _holds) in _NEEDS.items():
    globals()[f"require_{_name}"] = _requirement(f"require_{_name}", _words, _holds)

__all__ = ["device_count", "get_backend", "memory_allocated_func", "run_first", "skip", "slow", "torch_device"]
__all__ += [name for name in globals() if name.startswith("require_")]
