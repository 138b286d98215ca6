"""Profiles of a region by torch's profiler, and snapshots of the memory of a device."""

from accelerate.extension import Spec

_HERE = "accelerate.extensions.profile"

SPEC = Spec(
    "profile",
    methods={"profile": f"{_HERE}.region:profile"},
    handlers={"profile_handler": f"{_HERE}.settings:ProfileKwargs"},
)
