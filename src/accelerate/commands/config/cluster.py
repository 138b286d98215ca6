"""The interview about machines of your own: the public path of `accelerate.extensions.configure.cluster`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.configure.cluster")
