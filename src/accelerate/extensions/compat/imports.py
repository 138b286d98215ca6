"""Libraries that nothing in this package asks for, as programs do by `accelerate.utils.imports`."""

import functools
import importlib

from accelerate.base.imports import is_installed, library
from accelerate.base.versions import compare_versions

is_lomo_available = library("lomo", package="lomo_optim")
is_schedulefree_available = library("schedulefree")
is_triton_available = library("triton", "triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
is_boto3_available = library("boto3")
is_sagemaker_available = library("sagemaker")
is_datasets_available = library("datasets")
is_peft_available = library("peft")
is_timm_available = library("timm")
is_torchvision_available = library("torchvision")
is_torchdata_available = library("torchdata")
is_pandas_available = library("pandas")
is_matplotlib_available = library("matplotlib")
is_pytest_available = library("pytest")
is_tqdm_available = library("tqdm")
is_import_timer_available = library("import_timer")
is_pynvml_available = library("pynvml", "pynvml", "nvidia-ml-py")
is_amdsmi_available = library("amdsmi")


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """Tell whether a package is installed by a distribution of the same name, or by `metadata_name`."""
    return is_installed(pkg_name, *filter(None, [metadata_name]))


def is_torch_distributed_available() -> bool:
    """Tell whether torch was built with `torch.distributed`."""
    import torch

    return torch.distributed.is_available()


def is_pippy_available() -> bool:
    """Tell whether torch has `torch.distributed.pipelining`: every torch that this package supports."""
    return True


def is_weights_only_available() -> bool:
    """Tell whether `torch.load(weights_only=True)` takes a list of other classes that are safe: it always can."""
    return True


def is_bnb_available(min_version: str | None = None) -> bool:
    """Tell whether bitsandbytes is installed, in `min_version` or later; None takes any."""
    if not is_installed("bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


@functools.cache
def is_bitsandbytes_multi_backend_available() -> bool:
    """Tell whether the installed bitsandbytes works on other devices than CUDA GPUs."""
    return is_bnb_available() and "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Tell whether numpy is installed, in `min_version` or later."""
    return is_installed("numpy") and compare_versions("numpy", ">=", min_version)
