"""Training arguments of transformers next to a live Accelerator, patched: what is shared, what is refused, how it trains."""

import gc
import importlib.util
import sys

import torch
import transformers
from shim_tools import WORLD, Line, build, finish, forget, messages, rows, shared, start, train, works
from transformers import Trainer, TrainerCallback, TrainingArguments

import transformers_patch
from accelerate import Accelerator

PLAIN = {"TrainingArguments": TrainingArguments, "Seq2Seq": transformers.Seq2SeqTrainingArguments}
OWN = {"own": transformers_patch.TrainingArguments, "own Seq2Seq": transformers_patch.Seq2SeqTrainingArguments}
BF16 = {"mixed_precision": "bf16"}
ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
FITS = 4


def arguments_alone(cls, folder, **changes):
    accelerator = start()
    kept = shared(accelerator, build(cls, folder, **changes))
    if package == "ours":  # reset or not, it keeps its state
        works(accelerator)
    return kept


def sharing(classes, folder):
    """Return for every class whether a Trainer shares by default, and whether arguments do when told to reset."""
    found = {}
    for name, cls in classes.items():
        accelerator = start()
        arguments = build(cls, folder)
        trainer = Trainer(Line(), arguments, train_dataset=rows())
        assert arguments.device == accelerator.device == trainer.accelerator.device
        works(accelerator)
        works(trainer.accelerator)
        kept = shared(accelerator, arguments, trainer)
        found[name] = [kept, arguments_alone(cls, folder, preserve_accelerator_state=False)]
    return found


def refused(folder, kind, state=None, **changes):
    """Return the message of the error; every rank must have raised it, and the Accelerator must still work."""
    accelerator, message = start(**(state or {})), None
    try:
        build(TrainingArguments, folder, **changes)
    except kind as error:
        message = str(error)
    assert accelerator.gather(torch.tensor([message is not None])).tolist() == [True] * WORLD
    works(accelerator)
    return message


def trained(folder, state=None, **changes):
    accelerator = start(**(state or {}))
    arguments = build(TrainingArguments, folder, max_steps=2, **changes)
    kept = shared(accelerator, arguments)
    trainer, losses = train(arguments)
    assert len(losses) == 2 and all(loss == loss for loss in losses), losses
    works(trainer.accelerator)
    if kept:
        works(accelerator)
        assert shared(accelerator, arguments, trainer)
    return [trainer.accelerator.mixed_precision, kept]


def group(folder):
    """Return how often each disagreement with the live group warns on each rank, for three arguments in a row."""
    found = {}
    for name, changes in {
        "timeout": {"ddp_timeout": 77},
        "backend": {"ddp_backend": "nccl"},
        "neither": {"ddp_backend": "gloo" if WORLD > 1 else None},
    }.items():
        accelerator = start()
        with messages() as texts:
            for _ in range(3):
                build(TrainingArguments, folder, **changes)
        found[name] = [accelerator.gather(torch.tensor([len(texts)])).tolist(), *texts]
    return found


def losses_of(folder):
    """Return the losses of one training without the patch, and with it, alone and next to an Accelerator."""
    forget()
    transformers_patch.revert()
    _, unpatched = train(build(TrainingArguments, folder))
    forget()
    transformers_patch.apply()
    _, alone = train(build(TrainingArguments, folder))
    start()
    _, beside = train(build(TrainingArguments, folder))
    return [unpatched, alone, beside]


class Rates(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.append(args.learning_rate)


def search(folder):
    """Search for a learning rate next to an Accelerator; return the rates that each rank tried, and whether the state is shared."""
    if importlib.util.find_spec("optuna") is None:
        return None
    import optuna

    accelerator, rates = start(), Rates()
    arguments = build(TrainingArguments, folder, max_steps=2)
    trainer = Trainer(None, arguments, train_dataset=rows(), eval_dataset=rows(13), model_init=Line, callbacks=[rates])
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)},
        backend="optuna", n_trials=3, sampler=optuna.samplers.RandomSampler(seed=1),
    )  # fmt: skip
    works(accelerator)
    tried = trainer.accelerator.gather(torch.tensor(rates.seen)).reshape(-1, 3).tolist()
    return {"tried": tried, "shared": shared(accelerator, trainer.args, trainer)}


def trainer_twice(folder):
    accelerator = start()
    arguments = build(TrainingArguments, folder)
    trainers, losses = zip(train(arguments), train(arguments), strict=True)
    works(accelerator)
    evaluations = [trainer.evaluate()["eval_loss"] for trainer in trainers]
    return [*losses, evaluations, [shared(accelerator, arguments, trainer) for trainer in trainers]]


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


def batch_size(folder):
    """Let the Trainer find a batch size that fits; return the sizes that were tried, next to a live Accelerator."""
    accelerator, model = start(), Hungry()
    arguments = build(TrainingArguments, folder, per_device_train_batch_size=6, auto_find_batch_size=True, max_steps=2)
    trainer, losses = train(arguments, model)
    works(accelerator)
    found = [accelerator.gather(torch.tensor([size])).tolist() for size in (max(model.batches), model.batches[-1])]
    return {"sizes": found, "steps": len(losses), "shared": shared(accelerator, arguments, trainer)}


def accelerator_afterwards(folder):
    forget()
    arguments = build(TrainingArguments, folder, bf16=True)
    accelerator = Accelerator(mixed_precision="bf16")
    trainer, _ = train(arguments)
    again = build(TrainingArguments, folder, bf16=True)
    works(accelerator)
    precisions = [accelerator.mixed_precision, trainer.accelerator.mixed_precision]
    return [*precisions, *(shared(accelerator, made, trainer) for made in (arguments, again))]


folder, package = sys.argv[1:]
# The Trainer collects garbage several times per training, over everything that was imported.
gc.freeze()
figures = {"unpatched": [arguments_alone(cls, folder) for cls in PLAIN.values()], **sharing(OWN, folder)}
transformers_patch.apply()
with messages() as texts:
    figures |= sharing(PLAIN, folder)
figures["warned of a reset"] = len(texts)
finish(
    **figures,
    refused={
        "bf16": refused(folder, ValueError, bf16=True), "no": refused(folder, ValueError, state=BF16),
        "DeepSpeed": refused(folder, RuntimeError, deepspeed=ZERO),
        "FSDP": refused(folder, RuntimeError, fsdp="full_shard"),
    },
    ways={
        "change the arguments": trained(folder, bf16=False),
        "change the state": trained(folder, state=BF16, bf16=True),
        "reset": trained(folder, bf16=True, preserve_accelerator_state=False),
    }, group=group(folder), losses=losses_of(folder), search=search(folder), twice=trainer_twice(folder),
    batch=batch_size(folder), afterwards=accelerator_afterwards(folder),
)  # fmt: skip
