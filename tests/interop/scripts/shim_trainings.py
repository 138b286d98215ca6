"""What people do with a Trainer beside a live Accelerator: search, re-run a cell, train twice, find a batch size."""

import gc
import importlib.util
import sys

import torch
from shim_tools import Line, build, finish, one_of, rows, shared, start, train, works
from transformers import Trainer, TrainerCallback, TrainingArguments

import transformers_patch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

TRIALS = 3
FITS = 4


class Rates(TrainerCallback):
    """Notes the learning rate of every training that begins."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.append(args.learning_rate)


class Hungry(Line):
    """Runs out of memory on a batch that is larger than fits, as a GPU does."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def forward(self, x, labels):
        if self.training:
            self.batches.append(len(x))
            if len(x) > FITS:
                raise RuntimeError("CUDA out of memory. Tried to allocate more than there is.")
        return super().forward(x, labels)


def search(folder):
    """Search for a learning rate; return the rates that were tried on each rank, and the best one with its loss."""
    import optuna

    arguments, rates = build(TrainingArguments, folder, max_steps=2), Rates()
    trainer = Trainer(None, arguments, train_dataset=rows(), eval_dataset=rows(13), model_init=Line, callbacks=[rates])
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)},
        backend="optuna",
        n_trials=TRIALS,
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    tried = trainer.accelerator.gather(torch.tensor(rates.seen)).reshape(-1, TRIALS).tolist()
    found = [best.run_id, best.objective, best.hyperparameters] if best is not None else None
    return trainer, {"tried": tried, "best": found}


def searches(folder):
    """Return what a search finds without the patch, with it, and with it beside an Accelerator that works afterwards."""
    if importlib.util.find_spec("optuna") is None:
        return None
    AcceleratorState._reset_state(reset_partial_state=True)
    transformers_patch.revert()
    _, unpatched = search(folder)
    transformers_patch.apply()
    AcceleratorState._reset_state(reset_partial_state=True)
    _, alone = search(folder)
    accelerator = start()
    trainer, beside = search(folder)
    works(accelerator)
    return {
        "unpatched": unpatched,
        "alone": alone,
        "beside": beside,
        "shared": shared(accelerator, trainer.args, trainer),
    }


CELL = """
accelerator = Accelerator(cpu=True)
mine = accelerator.prepare(Line())
arguments = build(TrainingArguments, folder)
trainer, losses = train(arguments)
runs.append([losses, shared(accelerator, arguments, trainer), works(accelerator)])
"""


def notebook(folder):
    """Run one cell twice in one namespace, as a notebook does."""
    AcceleratorState._reset_state(reset_partial_state=True)
    names = {**globals(), "folder": folder, "runs": []}
    states = []
    for _ in range(2):
        exec(compile(CELL, "cell", "exec"), names)
        states.append(names["accelerator"].state)
    works(names["accelerator"])
    return {"runs": names["runs"], "one state": one_of(states)}


def losses_of(folder):
    """Return the losses of one training without the patch, and with it, alone and beside an Accelerator."""
    AcceleratorState._reset_state(reset_partial_state=True)
    transformers_patch.revert()
    _, unpatched = train(build(TrainingArguments, folder))
    AcceleratorState._reset_state(reset_partial_state=True)
    transformers_patch.apply()
    _, alone = train(build(TrainingArguments, folder))
    start()
    _, beside = train(build(TrainingArguments, folder))
    _, own = train(build(transformers_patch.TrainingArguments, folder))
    return [unpatched, alone, beside, own]


def trainer_twice(folder):
    """Build and train two Trainers over the same arguments, then evaluate both."""
    accelerator = start()
    arguments = build(TrainingArguments, folder)
    first, losses = train(arguments)
    works(accelerator)
    second, again = train(arguments)
    works(accelerator)
    evaluations = [trainer.evaluate()["eval_loss"] for trainer in (first, second)]
    return {
        "losses": [losses, again],
        "evaluations": evaluations,
        "shared": [shared(accelerator, arguments, trainer) for trainer in (first, second)],
    }


def batch_size(folder):
    """Let the Trainer find a batch size that fits; return the sizes that were tried, beside a live Accelerator."""
    accelerator, model = start(), Hungry()
    arguments = build(TrainingArguments, folder, per_device_train_batch_size=6, auto_find_batch_size=True, max_steps=2)
    trainer, losses = train(arguments, model)
    works(accelerator)
    found = [accelerator.gather(torch.tensor([size])).tolist() for size in (max(model.batches), model.batches[-1])]
    return {"sizes": found, "steps": len(losses), "shared": shared(accelerator, arguments, trainer)}


def accelerator_afterwards(folder):
    """Build arguments, then an Accelerator with a precision of its own, train, and build arguments once more."""
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = build(TrainingArguments, folder, bf16=True)
    accelerator = Accelerator(mixed_precision="bf16")
    trainer, losses = train(arguments)
    again = build(TrainingArguments, folder, bf16=True)
    works(accelerator)
    state = PartialState()
    return {
        "precisions": [accelerator.mixed_precision, trainer.accelerator.mixed_precision],
        "steps": len(losses),
        "shared": [shared(accelerator, made, trainer) for made in (arguments, again)],
        "devices": sorted({accelerator.device.type, arguments.device.type, state.device.type}),
    }


def main():
    folder = sys.argv[1]
    # The Trainer collects garbage several times per training, over everything that was imported.
    gc.freeze()
    transformers_patch.apply()
    finish(
        losses=losses_of(folder),
        search=searches(folder),
        notebook=notebook(folder),
        twice=trainer_twice(folder),
        batch=batch_size(folder),
        afterwards=accelerator_afterwards(folder),
    )


if __name__ == "__main__":
    main()
