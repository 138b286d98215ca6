"""Pipelines for inference."""

from accelerate.extension import Spec

SPEC = Spec("inference")
