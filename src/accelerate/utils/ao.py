"""8-bit layers of torchao. The public path of `accelerate.precision.ao`."""

from accelerate.base import _lazy
from accelerate.precision.ao import *  # noqa: F403

__getattr__ = _lazy.aliases(__name__)
