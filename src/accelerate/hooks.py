"""The public path of `accelerate.extensions.big_models.hooks`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.big_models.hooks")
