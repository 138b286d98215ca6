"""A moving average of a model's weights."""

from accelerate.extension import Spec

SPEC = Spec("ema", methods={"ema": "accelerate.extensions.ema.averages:ema"})
