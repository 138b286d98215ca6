"""Runs that save themselves and leave after a signal."""

import sys
from typing import Any

from accelerate.extension import Spec

_WATCH = "accelerate.extensions.preemption.watch"


def _arrives(models: list[Any]) -> bool:
    # An Accelerator without the setting prepares objects for the loop of one that has it.
    is_watching: bool = sys.modules[_WATCH].is_watching()
    return is_watching


SPEC = Spec(
    "preemption",
    extension=f"{_WATCH}:Preemption",
    attaches=lambda run: run.project_configuration.save_on_signal is not None,
    late=False,
    arrives=_arrives,
    needs=_WATCH,
    methods={"check_stop": f"{_WATCH}:check_stop"},
    attributes={"should_stop": f"{_WATCH}:should_stop"},
)
