"""Checks that all ranks call the same collective."""

from accelerate.extension import Spec

SPEC = Spec("operation_checks", operation_checks="accelerate.extensions.operation_checks.communicator")
