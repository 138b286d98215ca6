"""TRL's SFTTrainer with a PEFT LoRA adapter, and without; with `dpo`, DPOTrainer with a reference model too."""

import sys

from datasets import Dataset
from peft import LoraConfig
from tiny import causal_model, losses, report, sentences, tokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
COMMON = {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "seed": 5}
COMMON |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}


def build(folder, model, adapter=None):
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=folder, gradient_checkpointing=False, max_length=16, **COMMON),
        train_dataset=Dataset.from_dict({"text": sentences(32)}), processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip


def preferences(folder):
    pairs = {name: sentences(32, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"), 1)}
    return DPOTrainer(
        model=causal_model(), ref_model=causal_model(1),
        args=DPOConfig(output_dir=folder, gradient_checkpointing=False, max_length=32, **COMMON),
        train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer(),
    )  # fmt: skip


def train(trainer):
    trainer.train()
    return losses(trainer)


folder, *more = sys.argv[1:]
found = {"sft": train(build(folder + "/full", causal_model()))}
found["lora"] = train(build(folder + "/lora", causal_model(), ADAPTER))
if more:
    found["dpo"] = train(preferences(folder + "/dpo"))
report(**found)
