"""Layers of Transformer Engine. The public path of `accelerate.precision.transformer_engine`."""

from accelerate.base import _lazy
from accelerate.precision.transformer_engine import *  # noqa: F403

__getattr__ = _lazy.aliases(__name__)
