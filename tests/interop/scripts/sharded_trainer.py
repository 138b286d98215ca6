"""transformers' Trainer over sharded models: as data-parallel training, with checkpoints to continue from and weights to load.

accelerate launch --cpu --num_processes 2 sharded_trainer.py FOLDER [STRATEGY ...]
"""

import gc
import os
import sys

import torch
from arrived_models import LAYOUTS, source
from sharded_models import EXACT, LENGTH, WORDS, close, llama, seeded
from tiny import apart, report
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from accelerate import ParallelismConfig
from accelerate.state import PartialState

STEPS, LONG = 4, 20
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
QUICK = ("fsdp2", "tensors", "arrived:ep-fsdp")


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
    arguments = TrainingArguments(folder, **common | options)
    return Trainer(model or seeded(llama), arguments, train_dataset=Rows(48), eval_dataset=Rows(8))


def logged(trainer):
    return [entry[key] for entry in trainer.state.log_history if "grad_norm" in entry for key in ("loss", "grad_norm")]


def saved(trainer, folder, loss):
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


class Kept(TrainerCallback):
    """Saves the run by the Accelerator after half of its steps; or loads it before the first, and ends after as many."""

    def __init__(self, folder, loads):
        self.folder, self.loads = folder, loads

    def on_train_begin(self, args, state, control, **_):
        if self.loads:
            self.trainer.accelerator.load_state(self.folder)
            self.trainer.lr_scheduler.load_state_dict(torch.load(f"{self.folder}/schedule.pt"))

    def on_step_end(self, args, state, control, **_):
        if state.global_step == LONG // 2 and self.loads:
            control.should_training_stop = True
        elif state.global_step == LONG // 2:
            self.trainer.accelerator.save_state(self.folder)
            if self.trainer.is_world_process_zero():
                torch.save(self.trainer.lr_scheduler.state_dict(), f"{self.folder}/schedule.pt")
            self.trainer.accelerator.wait_for_everyone()


def arrives(folder, name):
    """A model that transformers shards as it loads it. The Trainer refuses to save its optimizer: the Accelerator does that."""
    make, replicas, sizes = LAYOUTS[name]
    place, count = source(folder, make), PartialState().num_processes
    # All rows are the same: which come first does not matter to a run that is loaded.
    data = torch.utils.data.Subset(Rows(1), [0] * 320)

    # The Trainer adds the loss that spreads tokens over experts once for each replica, of which the plain run has more.
    plain_loss = {"router_aux_loss_coef": 0.0} if "ep_size" in sizes and replicas != count else {}

    def run(where, batch, loads=None, **sharded):
        model = AutoModelForCausalLM.from_pretrained(place, **plain_loss, **sharded).train()
        trainer = build(where, batch, model, save_strategy="no", max_steps=LONG)
        trainer.train_dataset, trainer.eval_dataset = data, torch.utils.data.Subset(data, range(8))
        if loads is not None:
            kept = Kept(f"{folder}/{name}-kept", loads)
            kept.trainer = trainer
            trainer.add_callback(kept)
        trainer.train()
        return trainer, trainer.evaluate()["eval_loss"]

    with apart():
        plain, expected_loss = run(f"{folder}/plain-{name}", 4 // count)
        expected = logged(plain)
    sharded = {"distributed_config": DistributedConfig(**sizes)}
    with apart():
        trainer, loss = run(f"{folder}/{name}", 4 // replicas, loads=False, **sharded)
        found = logged(trainer)
        close(found, expected, name)
        assert abs(loss - expected_loss) <= EXACT, (name, loss, expected_loss)
        trainer.save_model(f"{folder}/{name}-final")
        trainer.accelerator.wait_for_everyone()
        whole = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}-final").state_dict()
        mine = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        assert not mine or all(torch.equal(mine[key], value) for key, value in whole.items()), name
    with apart():
        resumed, _ = run(f"{folder}/{name}", 4 // replicas, loads=True, **sharded)
        close(logged(resumed), found[len(found) // 2 :], f"{name}, resumed")


def main():
    folder, *chosen = sys.argv[1:]
    gc.freeze()  # collections are many, and pass over what imports have left
    with apart():
        plain = build(f"{folder}/plain", 2, save_strategy="no")
        plain.train()
        expected, loss = logged(plain), plain.evaluate()["eval_loss"]
    assert len(expected) == 2 * STEPS, expected
    chosen = chosen or QUICK
    for name in chosen:
        if name.startswith("arrived:"):
            arrives(folder, name.removeprefix("arrived:"))
        elif name == "tensors":
            trains_in_tensors(folder, expected, loss)
        else:
            trains(folder, name, expected, loss)
    report(passed=len(chosen), losses=expected)


if __name__ == "__main__":
    main()
