"""Experiment trackers, built-in and custom."""

from accelerate.extension import Spec

_RUN = "accelerate.extensions.trackers.run"
SPEC = Spec(
    "trackers",
    extension="accelerate.extensions.trackers.extension:Trackers",
    attaches=lambda run: True,
    methods={name: f"{_RUN}:{name}" for name in ("init_trackers", "get_tracker", "log")},
)
