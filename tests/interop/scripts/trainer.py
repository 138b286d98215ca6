"""transformers' Trainer: train with accumulation, evaluate, predict, checkpoint, resume; with ZeRO stages by DeepSpeed (`2 3+bf16`)."""

import os
import sys

import numpy as np
from tiny import TokenRows, causal_model, losses, report
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

from accelerate import DataLoaderConfiguration


def build(folder, kind=Trainer, **options):
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, per_device_eval_batch_size=5, gradient_accumulation_steps=2,
        num_train_epochs=2, learning_rate=1e-2, logging_steps=1, save_steps=3, eval_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    return kind(causal_model(), arguments, train_dataset=TokenRows(48), eval_dataset=TokenRows(13, seed=1))


class DividedTrainer(Trainer):
    """A Trainer whose loader has torch's sampler, which divides the rows among the processes."""

    def get_train_dataloader(self):
        state, rows = self.accelerator.state, self.train_dataset
        sampler = DistributedSampler(rows, state.num_processes, state.process_index, seed=3)
        return self.accelerator.prepare(DataLoader(rows, 4, sampler=sampler))

    def training_step(self, model, inputs, *rest, **options):
        self.seen = getattr(self, "seen", 0) + len(self.accelerator.gather_for_metrics(inputs["input_ids"]))
        return super().training_step(model, inputs, *rest, **options)


AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
ZERO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
# torch_adam: DeepSpeed compiles its own otherwise.
OPTIMIZER = {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": True}
SCHEDULER = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
SECTIONS = {
    "gather": {}, "bf16": {"bf16": {"enabled": "auto"}}, "optimizer": {"optimizer": {"type": "AdamW", "params": OPTIMIZER}},
    "scheduler": {
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        "scheduler": {"type": "WarmupDecayLR", "params": {**SCHEDULER, "warmup_type": "linear"}},
    },
}  # fmt: skip


def engine(stage, *sections):
    config = {**AUTO, "zero_optimization": {"stage": int(stage), **ZERO}}
    for name in sections:
        config |= SECTIONS[name]
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = "gather" in sections
    return {"deepspeed": config, "bf16": "bf16" in sections, "warmup_steps": 2 if "scheduler" in sections else 0}


def run(folder, stage=None, *sections):
    options = engine(stage, *sections) if stage else {}
    # DeepSpeed evaluates without training at stage 3 alone.
    alone = None if stage == "2" else build(folder, **options).evaluate()["eval_loss"]
    trainer = build(folder, **options)
    trainer.train()
    evaluation = trainer.evaluate()
    prediction = trainer.predict(TokenRows(13, seed=1))
    trainer.save_model(f"{folder}/final")
    resumed = build(folder, **options)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    if stage is None and hasattr(DataLoaderConfiguration, "already_sharded"):
        divided = build(folder, DividedTrainer)
        divided.train()
        assert divided.seen == 2 * 48 and divided.state.global_step == len(losses(trainer)), divided.seen
    assert prediction.predictions.shape[0] == 13, prediction.predictions.shape
    assert len(trainer.accelerator._models) == 1, trainer.accelerator._models
    saved = {"saved": os.listdir(f"{folder}/final")} if stage and trainer.is_world_process_zero() else {}
    return {
        "losses": losses(trainer), "resumed": losses(resumed), "eval_loss": evaluation["eval_loss"], "alone": alone,
        "prediction": float(np.abs(prediction.predictions).mean()), **saved,
    }  # fmt: skip


folder, *cases = sys.argv[1:]
report(**({case: run(f"{folder}/{case}", *case.split("+")) for case in cases} if cases else run(folder)))
