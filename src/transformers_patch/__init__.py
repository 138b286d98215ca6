"""Keeps the shared accelerator state when transformers' training arguments are built.

transformers resets the state that all Accelerators of a process share whenever a `TrainingArguments` is built. Either use
the two classes of this package, or patch the installed ones in place:

    import transformers_patch
    transformers_patch.apply()

Works with this fork of Accelerate and with upstream's. With `apply(checkpoints=True)`, or the mixin of
`transformers_patch.checkpoints`, a Trainer's checkpoints are atomic: complete or absent. That needs this fork. With
`apply(losses=True)` its loss and norm on several ranks equal those of one process.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformers_patch.errors import UnsupportedVersion

if TYPE_CHECKING:
    from transformers_patch.arguments import Seq2SeqTrainingArguments, TrainingArguments
    from transformers_patch.engine import Status, applied, apply, revert, status
    from transformers_patch.throughput import ThroughputCallback

__all__ = [
    "Seq2SeqTrainingArguments",
    "Status",
    "ThroughputCallback",
    "TrainingArguments",
    "UnsupportedVersion",
    "applied",
    "apply",
    "revert",
    "status",
]

# transformers is imported when a class is first asked for, so that a wrong release raises there and not here.
_HOMES = {
    **dict.fromkeys(("apply", "applied", "revert", "status", "Status"), "engine"),
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), "arguments"),
    "ThroughputCallback": "throughput",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
