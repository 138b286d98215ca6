"""Tiny random models, tokenizers and data sets, made on the spot: nothing is downloaded."""

import json
import os
import random
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from accelerate.state import AcceleratorState, GradientState

WORDS = [
    "a", "cat", "dog", "bird", "sees", "hears", "likes", "the", "red", "blue", "small", "big", "house", "tree",
    "river", "and", "or", "not",
]  # fmt: skip


def tokenizer():
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        eos_token="[EOS]", model_max_length=32,
    )  # fmt: skip


def sentences(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(4, 10))) for _ in range(count)]


def causal_model(seed=0):
    set_seed(seed)
    length = len(WORDS) + 5
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=length, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=4, eos_token_id=4,
            pad_token_id=0,
        ),
    )  # fmt: skip


def bert_config():
    return BertConfig(
        vocab_size=len(WORDS) + 5, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip


class TokenRows(torch.utils.data.Dataset):
    """Padded token ids with labels for language modelling."""

    def __init__(self, count, seed=0):
        encoded = tokenizer()(sentences(count, seed), padding="max_length", max_length=12, truncation=True)
        self.ids = torch.tensor(encoded["input_ids"])
        self.mask = torch.tensor(encoded["attention_mask"])

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].masked_fill(self.mask[index] == 0, -100)
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": labels}


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


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def ranks():
    return int(os.environ.get("WORLD_SIZE", "1"))


def everywhere(value):
    """Return the values of all ranks."""
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Exact:
    """A mixin of Trainers: keeps each loss as it is, and writes it down; the Trainer's log rounds it."""

    def training_step(self, *args, **options):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        loss = super().training_step(*args, **options)
        self.losses = [*getattr(self, "losses", []), loss.item().hex()]
        with open(Path(self.args.output_dir, f"losses_{self.args.process_index}.txt"), "a", encoding="utf-8") as file:
            file.write(f"{self.state.global_step} {loss.item().hex()}\n")
        return loss


def report(**figures):
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(figures), flush=True)
