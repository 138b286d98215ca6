"""TRL's SFTTrainer with a PEFT LoRA adapter, and without."""

import sys

from datasets import Dataset
from peft import LoraConfig
from tiny import causal_model, report, sentences, tokenizer
from trl import SFTConfig, SFTTrainer

ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
COMMON = {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "seed": 5}
COMMON |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}


def build(folder, model, adapter=None, **options):
    """Return a trainer of a tiny model on 32 sentences, offline and on the CPU."""
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=folder, gradient_checkpointing=False, max_length=16, **COMMON, **options),
        train_dataset=Dataset.from_dict({"text": sentences(32)}), processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip


def train(folder, adapter):
    trainer = build(folder, causal_model(), adapter)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    folder = sys.argv[1]
    report(sft=train(folder + "/full", None), lora=train(folder + "/lora", ADAPTER))


if __name__ == "__main__":
    main()
