"""Comparing the versions of installed distributions, without importing them."""

import functools
import importlib.metadata
from operator import eq, ge, gt, le, lt, ne
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.version import Version


STR_OPERATION_TO_FUNC = {">": gt, ">=": ge, "==": eq, "!=": ne, "<=": le, "<": lt}


def __getattr__(name: str) -> Any:
    if name == "torch_version":  # read when it is requested, because every import of the package passes here
        return installed_version("torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def installed_version(distribution: str) -> "Version":
    """Return an installed distribution's version, kept for the life of the process; else a PackageNotFoundError."""
    from packaging.version import parse

    return parse(importlib.metadata.version(distribution))


def compare_versions(library_or_version: "str | Version", operation: str, requirement_version: str) -> bool:
    """Compare the version of a library with a required one.

    Args:
        library_or_version: the name of an installed distribution, or a parsed version.
        operation: one of `<`, `<=`, `==`, `!=`, `>=`, `>`.
        requirement_version: what to compare with, for instance "2.4.0".

    Raises:
        ValueError: `operation` is unknown.
        importlib.metadata.PackageNotFoundError: the distribution is not installed.

    Example:
        >>> from accelerate.utils import compare_versions
        >>> compare_versions("torch", ">=", "2.0")
        True
    """
    from packaging.version import parse

    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation is {operation!r}. Choose one of: {', '.join(STR_OPERATION_TO_FUNC)}.")
    if isinstance(library_or_version, str):
        library_or_version = installed_version(library_or_version)
    return STR_OPERATION_TO_FUNC[operation](library_or_version, parse(str(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch with a required one, as `compare_versions` does.

    A local suffix counts: torch 2.6.0+cpu is not `== 2.6.0` but `> 2.6.0`.

    Example:
        >>> from accelerate.utils import is_torch_version
        >>> is_torch_version(">=", "2.0")
        True
    """
    return compare_versions("torch", operation, version)
