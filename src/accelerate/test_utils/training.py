"""The smallest model and data that can be trained: the public path of `accelerate.extensions.testing.training`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.testing.training")
