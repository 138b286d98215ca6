"""Correct token losses: the mean over all tokens of a step, not the mean of means.

Texts differ in length, so micro-batches and ranks have different numbers of tokens. If each averages its own loss, short texts weigh
too much. `accumulate(model, num_items=tokens)` makes the gradient the mean over all tokens of all micro-batches and ranks, for one
all-reduce of a number per step. The program compares both ways with one process that sees all tokens at once.

    accelerate launch --cpu --num_processes 2 examples/by_feature/tokens.py

Prints: gradient with num_items equals that of all tokens at once, the mean of means does not: True
"""

import copy
import pydoc_data.topics

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

MICRO_BATCH, STEPS = 2, 2


def collate(texts: list[str]) -> torch.Tensor:
    """Return bytes of texts as ids; -1 fills up the shorter ones."""
    rows = [torch.tensor(list(text.encode()[:400])) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def mean_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting the next byte, the mean over those that are there."""
    logits = model(ids[:, :-1].clamp(min=0))
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1)


def gradient(accelerator: Accelerator, model: nn.Module, texts: list[str], counted: bool) -> torch.Tensor:
    """Return the gradient of the first step, before the optimizer clears it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(texts, batch_size=MICRO_BATCH, collate_fn=collate)
    )
    for ids in loader:
        tokens = (ids[:, 1:] >= 0).sum()
        with accelerator.accumulate(model, num_items=tokens if counted else None):
            accelerator.backward(mean_loss(model, ids))  # the forward pass, too, inside the context
            optimizer.step()
    found = torch.cat([parameter.grad.flatten().cpu() for parameter in model.parameters()])
    accelerator.free_memory()
    return found


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    set_seed(0)
    texts = sorted(pydoc_data.topics.topics.values(), key=len)
    # One step: short and long texts, side by side.
    count = MICRO_BATCH * STEPS * accelerator.num_processes
    texts = texts[: count // 2] + texts[-(count - count // 2) :]
    model = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
    whole = copy.deepcopy(model)
    mean_loss(whole, collate(texts)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])

    errors = {}
    for counted in (True, False):
        found = gradient(accelerator, copy.deepcopy(model), texts, counted)
        errors[counted] = ((found - expected).norm() / expected.norm()).item()
    accelerator.print(f"relative error with num_items {errors[True]:.1e}, with the mean of means {errors[False]:.1e}")
    shown = errors[True] < 1e-5 and errors[False] > 1e-2
    accelerator.print(
        f"gradient with num_items equals that of all tokens at once, the mean of means does not: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
