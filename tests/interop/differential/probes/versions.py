"""Comparisons of versions."""

from interop.differential.core import Words, call

OPERATIONS = Words(["==", "!=", ">", ">=", "<", "<=", "=", "ge", "~=", ""])


call("utils.versions:is_torch_version", operation=OPERATIONS, version=["2.0", "2.13.0", "2.13", "99", "x", 2])
