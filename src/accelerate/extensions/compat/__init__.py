"""Names and functions of accelerate 1.15.0 that nothing in this package uses."""

from accelerate.extension import Spec

_METHODS = "accelerate.extensions.compat.accelerator"
SPEC = Spec(
    "compat",
    methods={name: f"{_METHODS}:{name}" for name in ("trigger_sync_in_backward", "set_trigger", "check_trigger")},
)
