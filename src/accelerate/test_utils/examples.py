"""Comparisons of example scripts: the public path of `accelerate.extensions.testing.examples`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.testing.examples")
