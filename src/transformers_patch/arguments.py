"""Training arguments with one more field, for code that may choose its class; nothing installed is changed.

They are pickled under this module's name: `training_args.bin` of a Trainer that used them loads where this package is.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import transformers

from transformers_patch import engine, training_args
from transformers_patch.registry import ENTRIES

_NEEDED = ENTRIES[0].check().needed


class _Keeps:
    # Comes before transformers' class in the order of inheritance, and calls its unpatched function.
    if _NEEDED:
        _setup_devices = training_args.keeping(transformers.TrainingArguments, engine.strategy_of_classes)
    else:

        def __post_init__(self, *args: Any) -> None:
            super().__post_init__(*args)  # type: ignore[misc]
            if not self.preserve_accelerator_state:  # type: ignore[attr-defined]
                warnings.warn(
                    f"preserve_accelerator_state=False is not applied: transformers {transformers.__version__} does not "
                    "reset the accelerator state. Call `AcceleratorState._reset_state(True)` yourself.",
                    UserWarning,
                    stacklevel=3,
                )


@dataclass
class TrainingArguments(_Keeps, transformers.TrainingArguments):
    """`transformers.TrainingArguments` that keep an existing accelerator state.

    Args:
        preserve_accelerator_state: Keep the state that an `Accelerator` or a `PartialState` has made; False resets it and
            builds a new one, as unpatched transformers does. Without a state both do the same.

        Every other argument is transformers' own. Build them on every rank.

    Raises:
        RuntimeError: They ask for DeepSpeed or FSDP, and the state was not made for it.
        ValueError: They ask for another device or mixed precision than the state has.

    Example:
        >>> from accelerate import Accelerator
        >>> from transformers_patch import TrainingArguments
        >>> accelerator = Accelerator(cpu=True)
        >>> arguments = TrainingArguments("out", use_cpu=True, report_to=[])
        >>> accelerator.num_processes
        1
    """

    preserve_accelerator_state: bool = field(default=True, kw_only=True, metadata={"help": training_args.HELP})


@dataclass
class Seq2SeqTrainingArguments(_Keeps, transformers.Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` that keep an accelerator state which exists already.

    Args:
        preserve_accelerator_state: As for `TrainingArguments` of this package.

    Example:
        >>> from transformers_patch import Seq2SeqTrainingArguments
        >>> Seq2SeqTrainingArguments("out", use_cpu=True, report_to=[], predict_with_generate=True).predict_with_generate
        True
    """

    preserve_accelerator_state: bool = field(default=True, kw_only=True, metadata={"help": training_args.HELP})
