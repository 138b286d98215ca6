"""TRL's SFTTrainer with a PEFT LoRA adapter, and without."""

import sys

from datasets import Dataset
from peft import LoraConfig
from tiny import causal_model, report, sentences, tokenizer
from trl import SFTConfig, SFTTrainer


def train(folder, adapter):
    arguments = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        max_length=16,
        seed=5,
    )
    trainer = SFTTrainer(
        model=causal_model(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": sentences(32)}),
        processing_class=tokenizer(),
        peft_config=adapter,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    folder = sys.argv[1]
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    report(sft=train(folder + "/full", None), lora=train(folder + "/lora", adapter))


if __name__ == "__main__":
    main()
