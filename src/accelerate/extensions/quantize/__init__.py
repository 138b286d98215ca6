"""Models that bitsandbytes quantises when they are loaded."""

from accelerate.extension import Spec

SPEC = Spec("quantize")
