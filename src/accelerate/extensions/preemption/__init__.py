"""Runs that save themselves and leave after a signal."""

import sys
from typing import Any

from accelerate.extension import Spec

_WATCH = "accelerate.extensions.preemption.watch"


def _attaches(run: Any) -> bool:
    # An Accelerator without the setting prepares objects for the loop of one that has it.
    watch = sys.modules.get(_WATCH)
    return run.project_configuration.save_on_signal is not None or (watch is not None and watch.is_watching())


SPEC = Spec(
    "preemption",
    extension=f"{_WATCH}:Preemption",
    attaches=_attaches,
    methods={"check_stop": f"{_WATCH}:check_stop"},
    attributes={"should_stop": f"{_WATCH}:should_stop"},
)
