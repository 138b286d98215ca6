"""An Accelerator, training arguments and a Trainer look at one state, in whichever class the arguments are."""

import sys

import transformers
from shim_tools import Line, build, finish, messages, rows, shared, start, works
from transformers import Trainer

import transformers_patch

PLAIN = {"TrainingArguments": transformers.TrainingArguments, "Seq2Seq": transformers.Seq2SeqTrainingArguments}
OWN = {"own": transformers_patch.TrainingArguments, "own Seq2Seq": transformers_patch.Seq2SeqTrainingArguments}


def with_trainer(cls, folder, **changes):
    """Build an Accelerator, arguments and a Trainer; say whether they share, once all of them work."""
    accelerator = start()
    arguments = build(cls, folder, **changes)
    trainer = Trainer(Line(), arguments, train_dataset=rows())
    assert arguments.device == accelerator.device == trainer.accelerator.device
    assert arguments.world_size == accelerator.num_processes == trainer.accelerator.num_processes
    works(accelerator)
    works(trainer.accelerator)
    return shared(accelerator, arguments, trainer)


def arguments_alone(cls, folder, **changes):
    """Say whether arguments share the state of an Accelerator that was there before them."""
    accelerator = start()
    return shared(accelerator, build(cls, folder, **changes))


def with_each_flag(classes, folder):
    """Return for every class what it does by itself, when told to keep, and when told to reset."""
    return {
        name: [
            with_trainer(cls, folder),
            with_trainer(cls, folder, preserve_accelerator_state=True),
            arguments_alone(cls, folder, preserve_accelerator_state=False),
        ]
        for name, cls in classes.items()
    }


def twice_in_a_row(folder):
    """Build two arguments and two Trainers over one Accelerator, which works in between."""
    accelerator = start()
    found = []
    for _ in range(2):
        arguments = build(transformers.TrainingArguments, folder)
        works(accelerator)
        trainer = Trainer(Line(), arguments, train_dataset=rows())
        works(accelerator)
        found.append(shared(accelerator, arguments, trainer))
    return found


def main():
    folder = sys.argv[1]
    figures = {"unpatched": [arguments_alone(cls, folder) for cls in PLAIN.values()]}
    figures["own"] = with_each_flag(OWN, folder)
    transformers_patch.apply()
    with messages() as texts:
        figures["patched"] = with_each_flag(PLAIN, folder)
        figures["own while patched"] = with_each_flag(OWN, folder)
    figures["warned of a reset"] = len(texts)
    figures["twice"] = twice_in_a_row(folder)
    finish(**figures)


if __name__ == "__main__":
    main()
