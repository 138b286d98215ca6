"""Runs that save themselves and leave after a signal."""

import sys

from accelerate.extension import Spec

_WATCH = "accelerate.extensions.preemption.watch"
SPEC = Spec(
    "preemption",
    extension=f"{_WATCH}:Preemption",
    # An Accelerator without the setting prepares objects for the loop of one that has it.
    attaches=lambda run: run.project_configuration.save_on_signal is not None or _WATCH in sys.modules,
    methods={"check_stop": f"{_WATCH}:check_stop"},
    attributes={"should_stop": f"{_WATCH}:should_stop"},
)
