"""Layers that recompute their activations in backward, under FSDP."""

from accelerate.extension import Spec

SPEC = Spec("activation_checkpointing")
