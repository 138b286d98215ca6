"""Functions started in several processes, from a notebook, a console or a test."""

from accelerate.extension import Spec

SPEC = Spec("notebook")
