"""LOMO optimizers, which update weights in their backward pass."""

from accelerate.extension import Spec

_HERE = "accelerate.extensions.lomo.lomo"
SPEC = Spec(
    "lomo",
    extension=f"{_HERE}:Lomo",
    attaches=lambda run: True,
    late=False,
    methods={"lomo_backward": f"{_HERE}:lomo_backward"},
)
