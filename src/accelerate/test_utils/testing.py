"""Helpers of test suites: the public path of `accelerate.extensions.testing.testing`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.testing.testing")
