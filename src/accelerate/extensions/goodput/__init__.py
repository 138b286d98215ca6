"""Goodput: the share of a run's wall time that went into new steps, over all restarts, by cause."""

import os

from accelerate.extension import Spec

_HERE = "accelerate.extensions.goodput.goodput"
# The file of a run's attempts, or whether there is one.
GOODPUT = "ACCELERATE_GOODPUT"

SPEC = Spec(
    "goodput",
    extension=f"{_HERE}:Goodput",
    attaches=lambda run: bool(os.environ.get(GOODPUT)),
    late=False,
    methods={"goodput": f"{_HERE}:goodput"},
)
