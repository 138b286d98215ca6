"""Helpers of the subcommands of `accelerate config`: the public path of `accelerate.extensions.configure.config_utils`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.configure.config_utils")
