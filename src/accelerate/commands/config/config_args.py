"""Configuration files as objects: the public path of `accelerate.extensions.configure.config_args`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.configure.config_args")
