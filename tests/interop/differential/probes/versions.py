"""Comparisons of versions."""

from accelerate.utils import versions
from interop.differential.core import Words, probe

OPERATIONS = Words(["==", "!=", ">", ">=", "<", "<=", "=", "ge", "~=", ""])


@probe(
    "utils.versions:compare_versions",
    library=["numpy", "torch", "1.2.3", "no-such-library"],
    operation=OPERATIONS,
    version=["0.1", "1.2.3", "1.2.3.dev0", "999", "", "one"],
)
def compare_versions(library: str, operation: str, version: str) -> bool:
    return versions.compare_versions(library, operation, version)


@probe("utils.versions:is_torch_version", operation=OPERATIONS, version=["2.0", "2.13.0", "2.13", "99", "x", 2])
def is_torch_version(operation: str, version: str) -> bool:
    return versions.is_torch_version(operation, version)
