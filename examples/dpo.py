"""Train on preferences with TRL's DPOTrainer on two processes: chosen answers become likelier than rejected ones.

Chosen answers are texts of Python's documentation, rejected ones the same words in random order. The model is a tiny random Llama and the
tokenizer is trained here, so nothing is downloaded. The reference model is a frozen copy, which the trainer prepares for evaluation: it
gets no wrapper and no optimizer, and needs no exchange.

    accelerate launch --cpu --num_processes 2 examples/dpo.py

Prints: loss fell below log 2, chosen answers are preferred to shuffled ones in most pairs: True
"""

import argparse
import math
import pathlib
import pydoc_data.topics
import random

import torch
from datasets import Dataset
from lora_sft import make_model, train_tokenizer  # of examples/
from trl import DPOConfig, DPOTrainer

from accelerate import PartialState


def make_pairs() -> Dataset:
    """Return prompts with an answer of the documentation, and the same words shuffled."""
    draw = random.Random(0)  # the same pairs on all processes
    rows: dict[str, list[str]] = {"prompt": [], "chosen": [], "rejected": []}
    for name, text in pydoc_data.topics.topics.items():
        words = text.split()[:24]
        shuffled = draw.sample(words, len(words))
        rows["prompt"].append(f"Python's {name}: ")
        rows["chosen"].append(" ".join(words))
        rows["rejected"].append(" ".join(shuffled))
    return Dataset.from_dict(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/dpo"))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    tokenizer = train_tokenizer(list(pydoc_data.topics.topics.values()))
    arguments = DPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        beta=0.1,
        max_length=128,
        gradient_checkpointing=False,
        bf16=False,  # True on GPUs
        use_cpu=not torch.cuda.is_available(),
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model=make_model(tokenizer),
        ref_model=make_model(tokenizer),
        args=arguments,
        train_dataset=make_pairs(),
        processing_class=tokenizer,
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in entries]
    accuracies = [entry["rewards/accuracies"] for entry in entries]
    state = PartialState()
    state.print(f"losses {losses}\nshare of pairs in which the chosen answer is preferred {accuracies}")
    shown = losses[-1] < math.log(2) and accuracies[-1] > 0.6
    if state.is_main_process:
        print(
            f"loss fell below log 2, chosen answers are preferred to shuffled ones in most pairs: {shown}", flush=True
        )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
