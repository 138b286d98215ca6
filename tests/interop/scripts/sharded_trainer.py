"""transformers' Trainer over sharded models: as data-parallel training, with checkpoints to go on from and weights to load.

accelerate launch --cpu --num_processes 2 sharded_trainer.py FOLDER [STRATEGY ...]
"""

import os
import sys
from contextlib import contextmanager

import torch
from sharded_models import EXACT, LENGTH, WORDS, close, llama, seeded
from tiny import report
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState

STEPS = 4
LAYERS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


def fsdp(version, **options):
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version, **LAYERS, **options}}


# The batch of each process, and arguments. What a mesh does not count as data-parallel sees the whole batch.
STRATEGIES = {
    "fsdp2": (2, lambda: fsdp(2)), "fsdp1": (2, lambda: fsdp(1)),
    "fsdp1_orig": (2, lambda: fsdp(1, use_orig_params=True)),
    "shards": (2, lambda: fsdp(2, state_dict_type="SHARDED_STATE_DICT")),
    "mesh": (2, lambda: {**fsdp(2), "parallelism_config": ParallelismConfig(dp_shard_size=2)}),
    "context": (4, lambda: {**fsdp(2), "parallelism_config": ParallelismConfig(cp_size=2)}),
}  # fmt: skip
QUICK = ("fsdp2", "tensors")


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = torch.randint(3, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def build(folder, batch, model=None, **options):
    common = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "max_steps": STEPS, "seed": 3}
    common |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-4, "max_grad_norm": 0.5}
    common |= {"logging_steps": 1, "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(folder, **common, **options)
    return Trainer(model or seeded(llama), arguments, train_dataset=Rows(48), eval_dataset=Rows(8))


def logged(trainer):
    return [entry[key] for entry in trainer.state.log_history if "grad_norm" in entry for key in ("loss", "grad_norm")]


@contextmanager
def apart():
    """Forget states, and the variables that TrainingArguments writes, afterwards."""
    before = dict(os.environ)
    try:
        yield
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(True)
        os.environ.clear()
        os.environ.update(before)


def saved(trainer, folder, loss):
    """What `save_model` writes is the model that was evaluated."""
    trainer.save_model(folder)
    trainer.accelerator.wait_for_everyone()
    rows = Rows(8).ids
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=rows, labels=rows).loss.item()
    assert abs(found - loss) <= EXACT, (folder, found, loss)


def trains(folder, name, expected, expected_loss):
    """Losses, norms and the evaluation are those of data-parallel training; a resumed run repeats what was cut off."""
    batch, options = STRATEGIES[name]
    folder = f"{folder}/{name}"
    with apart():
        trainer = build(folder, batch, **options())
        trainer.train()
        assert str(trainer.accelerator.distributed_type.value) == "FSDP", trainer.accelerator.distributed_type
        close(logged(trainer), expected, name)
        loss = trainer.evaluate()["eval_loss"]
        assert abs(loss - expected_loss) <= EXACT, (name, loss, expected_loss)
        if name != "shards":  # of which the Trainer's save_model writes nothing
            saved(trainer, f"{folder}/final", loss)
    with apart():
        resumed = build(folder, batch, **options())
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        close(logged(resumed), expected, f"{name}, resumed")
        assert resumed.state.global_step == STEPS


def trains_in_tensors(folder, expected, expected_loss):
    """A model that transformers has split by its own plan. The Trainer saves its weights alone, by its own rule."""
    main = int(os.environ.get("RANK", "0")) == 0
    source, folder = f"{folder}/source", f"{folder}/tensors"
    with apart():
        state = PartialState(cpu=True)
        if main:
            seeded(llama).save_pretrained(source)
        state.wait_for_everyone()
        model = AutoModelForCausalLM.from_pretrained(source, tp_plan="auto").train()
        layout = ParallelismConfig(tp_size=2)
        trainer = build(folder, 4, model, parallelism_config=layout, save_only_model=True)
        trainer.train()
        close(logged(trainer), expected, "tensors")
        loss = trainer.evaluate()["eval_loss"]
        assert abs(loss - expected_loss) <= EXACT, (loss, expected_loss)
        saved(trainer, f"{folder}/final", loss)


def main():
    folder, *chosen = sys.argv[1:]
    with apart():
        plain = build(f"{folder}/plain", 2, save_strategy="no")
        plain.train()
        expected, loss = logged(plain), plain.evaluate()["eval_loss"]
    assert len(expected) == 2 * STEPS, expected
    chosen = chosen or QUICK
    for name in chosen:
        if name == "tensors":
            trains_in_tensors(folder, expected, loss)
        else:
            trains(folder, name, expected, loss)
    report(passed=len(chosen), losses=expected)


if __name__ == "__main__":
    main()
