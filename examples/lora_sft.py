"""Fine-tune a language model with LoRA and TRL's SFTTrainer on two processes, offline from the first byte.

The tokenizer is trained here on Python's documentation, and the model is a tiny random Llama, so nothing is downloaded; put
`from_pretrained` in their place for real work. Answers are the descriptions of Python's topics, prompts their names: the loss counts
answers alone. Only the adapters train and are saved. TRL and transformers build their Accelerator by themselves: launch as ever.

    accelerate launch --cpu --num_processes 2 examples/lora_sft.py

Prints: loss fell, under a third of the parameters train, adapter saved and loaded with the same loss: True
"""

import argparse
import pathlib
import pydoc_data.topics

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from accelerate import PartialState


def train_tokenizer(texts: list[str], size: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that was trained on texts; the same on all processes."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a tiny random model, equal on all processes."""
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends, tie_word_embeddings=False, initializer_range=0.1)
    )


def make_rows() -> Dataset:
    """Return names of topics of Python's documentation with the beginnings of their texts."""
    topics = pydoc_data.topics.topics
    completions = [" ".join(text.split())[:200] for text in topics.values()]
    return Dataset.from_dict({"prompt": [f"Python's {name}: " for name in topics], "completion": completions})


@torch.no_grad()
def loss_of(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> float:
    """Return the loss of a few whole texts."""
    model.eval()
    texts = [row["prompt"] + row["completion"] for row in rows.select(range(4))]
    losses = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]], device=next(model.parameters()).device)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/lora_sft"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    tokenizer = train_tokenizer(list(pydoc_data.topics.topics.values()))
    rows = make_rows()
    arguments = SFTConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        lr_scheduler_type="cosine",
        max_length=96,
        completion_only_loss=True,
        gradient_checkpointing=False,
        bf16=False,  # True on GPUs
        use_cpu=not torch.cuda.is_available(),
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        make_model(tokenizer), arguments, train_dataset=rows, processing_class=tokenizer, peft_config=adapter
    )
    parameters = list(trainer.model.parameters())
    share = sum(p.numel() for p in parameters if p.requires_grad) / sum(p.numel() for p in parameters)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(options.out / "adapter")  # the main process writes, the adapters alone
    state = PartialState()
    state.wait_for_everyone()

    trained = loss_of(trainer.accelerator.unwrap_model(trainer.model), tokenizer, rows)
    loaded = PeftModel.from_pretrained(make_model(tokenizer), options.out / "adapter").to(state.device)
    again = loss_of(loaded, tokenizer, rows)
    state.print(f"losses {losses}; {100 * share:.0f} % of the parameters train; loss of the loaded model {again:.4f}")
    shown = losses[-1] < losses[0] - 0.1 and share < 1 / 3 and abs(again - trained) < 1e-4
    if state.is_main_process:
        print(
            f"loss fell, under a third of the parameters train, adapter saved and loaded with the same loss: {shown}",
            flush=True,
        )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
