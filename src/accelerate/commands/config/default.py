"""`accelerate config default`: the public path of `accelerate.extensions.configure.default`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.configure.default")
