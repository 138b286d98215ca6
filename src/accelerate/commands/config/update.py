"""`accelerate config update`: the public path of `accelerate.extensions.configure.update`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.configure.update")
