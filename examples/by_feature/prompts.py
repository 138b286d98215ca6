"""Split prompts over the processes, generate, and gather the texts in their order.

For inference each process has a full model and works on its own prompts; nothing is exchanged in between. Where the prompts do not divide,
the first processes get one more; `gather_for_metrics(..., use_gather_object=True)` takes lists of different lengths.

    accelerate launch --cpu --num_processes 2 examples/by_feature/prompts.py

Prints: 5 prompts on 2 processes, texts in order and equal to those of one process: True
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate import Accelerator
from accelerate.utils import set_seed

PROMPTS = ["def main(", "import torch", "for epoch in ", "class Block(", "return"]


def generate(model: GPT2LMHeadModel, prompt: str) -> str:
    """Continue a prompt by twelve bytes, the likeliest each time."""
    ids = torch.tensor([list(prompt.encode())], device=model.device)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    return bytes(made[0].tolist()).decode("latin-1")


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)  # a random model stands for one that `from_pretrained` loads on each process
    sizes = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).to(accelerator.device).eval()
    with accelerator.split_between_processes(PROMPTS) as mine:
        texts = [generate(model, prompt) for prompt in mine]
    counts = accelerator.gather_for_metrics([len(texts)], use_gather_object=True)
    texts = accelerator.gather_for_metrics(texts, use_gather_object=True)
    accelerator.print(f"prompts of each process: {counts}")
    same = texts == [generate(model, prompt) for prompt in PROMPTS]
    ranks = accelerator.num_processes
    accelerator.print(
        f"{len(texts)} prompts on {ranks} processes, texts in order and equal to those of one process: {same}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
