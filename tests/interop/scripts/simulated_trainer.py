"""A Trainer's program as a user writes it; the argument is its folder."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.randint(0, 128, (4096, 16))
arguments = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    save_strategy="no",
    report_to=[],
)
model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=128))
Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
