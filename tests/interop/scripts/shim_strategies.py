"""What becomes of a state that exists, under each strategy, and that everything is put back."""

import dataclasses
import sys

from shim_tools import Line, build, failure, finish, messages, start, works
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments

import transformers_patch
from accelerate.state import AcceleratorState, PartialState

CONFIGURED = {"accelerator_config": {"use_configured_state": True}}
RESET = {"preserve_accelerator_state": False}


def fate(folder, make, **changes):
    """Build arguments over a state that `make` has made; say "kept" or "reset", with a star for each warning of it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    make(folder)
    PartialState._shared_state["mark"] = True
    with messages() as texts:
        arguments = build(TrainingArguments, folder, **changes)
    kept = PartialState._shared_state.pop("mark", False)
    assert arguments.distributed_state.__dict__ is PartialState().__dict__
    return ("kept" if kept else "reset") + "*" * len(texts)


def by_accelerator(folder):
    start()


def by_process_state(folder):
    PartialState(cpu=True)


def by_arguments(folder):
    build(TrainingArguments, folder)


def by_arguments_and_trainer(folder):
    trainer = Trainer(Line(), build(TrainingArguments, folder), train_dataset=[])
    works(trainer.accelerator)


MAKERS = {
    "accelerator": by_accelerator,
    "process state": by_process_state,
    "arguments": by_arguments,
    "trainer": by_arguments_and_trainer,
}


def fates(folder):
    """Return the fate of every kind of state: by default, and for an Accelerator's also with the other settings."""
    found = {name: fate(folder, make) for name, make in MAKERS.items()}
    found["configured"] = fate(folder, by_accelerator, **CONFIGURED)
    found["configured arguments"] = fate(folder, by_arguments, **CONFIGURED)
    return found


def flagged(folder):
    return {
        "True": fate(folder, by_accelerator, preserve_accelerator_state=True),
        "False": fate(folder, by_accelerator, **RESET),
    }


def contradiction(folder):
    """Return the message for a flag that says reset and a configuration that says keep, over a state."""
    accelerator = start()
    message = failure(ValueError, lambda: build(TrainingArguments, folder, **RESET, **CONFIGURED))
    works(accelerator)
    return message


def no_state(folder):
    """Without a state nothing is kept and nothing refused, but for what transformers itself refuses."""
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = build(TrainingArguments, folder, bf16=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    message = failure(ValueError, lambda: build(TrainingArguments, folder, **CONFIGURED))
    return [arguments.device.type, "use_configured_state" in message]


def shape():
    """Return everything about the classes that the patch touches."""
    return [
        (dict(vars(cls)), dict(cls.__dataclass_fields__), dict(cls.__annotations__), dataclasses.fields(cls))
        for cls in (TrainingArguments, Seq2SeqTrainingArguments)
    ]


def restored(folder):
    """Apply and revert, twice each, and in blocks; say what is in force at each moment, and that all is put back."""
    before, seen = shape(), []

    def note():
        seen.append(transformers_patch.status()[0].applied)

    for strategy in ("preserve", "flag", "flag"):
        transformers_patch.apply(strategy)
        note()
    with transformers_patch.applied("conditional"):
        note()
    note()
    for _ in range(2):
        transformers_patch.revert()
        note()
    with transformers_patch.applied():
        note()
        with transformers_patch.applied("conditional"):
            note()
        note()
    try:
        with transformers_patch.applied():
            raise KeyError("a failure in the block")
    except KeyError:
        note()
    failure(TypeError, lambda: build(TrainingArguments, folder, preserve_accelerator_state=True))
    return {"seen": seen, "equal": shape() == before}


def main():
    folder = sys.argv[1]
    figures = {"unpatched": fates(folder), "restored": restored(folder)}
    for strategy in ("preserve", "flag", "conditional"):  # a switch, without a revert in between
        transformers_patch.apply(strategy)
        figures[strategy] = {**fates(folder), **flagged(folder)}
        figures[strategy]["no state"] = no_state(folder)
    transformers_patch.apply("flag")
    figures["contradiction"] = contradiction(folder)
    transformers_patch.revert()
    figures["reverted"] = fates(folder)
    finish(**figures)


if __name__ == "__main__":
    main()
