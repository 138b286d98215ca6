"""Commands and environments of processes: the public path of `accelerate.extensions.compat.launch`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.compat.launch")
