"""transformers' Trainer: train with accumulation, evaluate, predict, checkpoint, resume; with a ZeRO stage by DeepSpeed."""

import sys

import numpy as np
from tiny import TokenRows, causal_model, report
from transformers import Trainer, TrainingArguments


def build(folder, **options):
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, per_device_eval_batch_size=5, gradient_accumulation_steps=2,
        num_train_epochs=2, learning_rate=1e-2, logging_steps=1, save_steps=3, eval_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    return Trainer(causal_model(), arguments, train_dataset=TokenRows(48), eval_dataset=TokenRows(13, seed=1))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
ZERO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
folder, *stage = sys.argv[1:]
options = {"deepspeed": {**AUTO, "zero_optimization": {"stage": int(stage[0]), **ZERO}}} if stage else {}
trainer = build(folder, **options)
trainer.train()
evaluation = trainer.evaluate()
prediction = trainer.predict(TokenRows(13, seed=1))
resumed = build(folder, **options)
resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
assert prediction.predictions.shape[0] == 13, prediction.predictions.shape
assert len(trainer.accelerator._models) == 1, trainer.accelerator._models
report(
    losses=losses(trainer), resumed=losses(resumed), eval_loss=evaluation["eval_loss"],
    prediction=float(np.abs(prediction.predictions).mean()),
)  # fmt: skip
