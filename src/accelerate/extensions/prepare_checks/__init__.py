"""Warnings of prepared objects that do not train together as meant."""

from accelerate.extension import Spec

SPEC = Spec(
    "prepare_checks",
    extension="accelerate.extensions.prepare_checks.checks:PrepareChecks",
    attaches=lambda run: True,
    late=False,
)
