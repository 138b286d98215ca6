"""A search for the largest batch size that fits into memory."""

from accelerate.extension import Spec

SPEC = Spec("batch_size")
