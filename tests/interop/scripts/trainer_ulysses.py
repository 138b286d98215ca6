"""transformers' Trainer with sequences that DeepSpeed shares, or without: the same windows, evaluation, and a run that continues."""

import sys

import torch
from tiny import losses, report
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from accelerate import ParallelismConfig

LENGTH = 12


def rows(count, seed):
    ids = torch.randint(0, 64, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row, "position_ids": torch.arange(LENGTH)} for row in ids]


def build(folder, **options):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, per_device_eval_batch_size=3, num_train_epochs=2, learning_rate=1e-2,
        logging_steps=1, save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows(24, 1), eval_dataset=rows(9, 2))


folder, *shared = sys.argv[1:]
options = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
if shared:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    zero = {"gradient_clipping": "auto", "zero_optimization": {"stage": int(shared[0])}}
    layout = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
    options |= {"gradient_accumulation_steps": 4, "deepspeed": {**auto, **zero}, "parallelism_config": layout}
trainer = build(folder, **options)
trainer.train()
evaluation = trainer.evaluate()
resumed = build(folder, **options)
resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
report(losses=losses(trainer), resumed=losses(resumed), eval_loss=evaluation["eval_loss"])
