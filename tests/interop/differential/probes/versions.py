"""Comparisons of versions."""

from accelerate.utils import versions
from interop.differential.core import Words, probe

OPERATIONS = Words(["==", "!=", ">", ">=", "<", "<=", "=", "ge", "~=", ""])


@probe("utils.versions:is_torch_version", operation=OPERATIONS, version=["2.0", "2.13.0", "2.13", "99", "x", 2])
def is_torch_version(operation: str, version: str) -> bool:
    return versions.is_torch_version(operation, version)
