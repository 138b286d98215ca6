"""Checks for installed libraries, which import none of them.

An installed library is looked up once. A missing library is looked up again, because a notebook may install it.
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable

from accelerate.base.environment import parse_flag_from_env
from accelerate.base.versions import compare_versions

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


is_msamp_available = library("msamp", "ms-amp")
is_deepspeed_available = library("deepspeed")
is_transformers_available = library("transformers")
is_torchdata_stateful_dataloader_available = library(
    "torchdata_stateful_dataloader", package="torchdata", at_least="0.8.0"
)
is_torchao_available = library("torchao", at_least="0.6.1")


def is_fp8_available() -> bool:
    """Tell whether a library for training in 8-bit floating point is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_transformer_engine_available() -> bool:
    """Tell whether Transformer Engine is installed: Intel's version next to the software of a Gaudi."""
    gaudi = importlib.util.find_spec("habana_frameworks") is not None
    return is_installed("intel_transformer_engine" if gaudi else "transformer_engine")


def is_rich_available() -> bool:
    """Tell whether rich is installed and wanted (ACCELERATE_ENABLE_RICH). Not a collective."""
    return is_installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)
