"""Names and functions of accelerate 1.15.0 that nothing in this package uses."""

from accelerate.extension import Spec

SPEC = Spec("compat")
