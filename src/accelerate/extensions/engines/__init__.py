"""Engines that own the whole step: a model, its optimizer and its scheduler are prepared together."""

from accelerate.extension import Spec

SPEC = Spec("engines")
