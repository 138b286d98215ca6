"""Seeds and states of random generators. The public path of `accelerate.runtime.random`."""

from accelerate.base import _lazy
from accelerate.runtime.random import *  # noqa: F403

__getattr__ = _lazy.aliases(__name__)
