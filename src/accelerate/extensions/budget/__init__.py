"""Batches by a budget of tokens, padded or packed."""

from accelerate.extension import Spec

SPEC = Spec("budget")
