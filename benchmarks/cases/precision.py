"""A training step of a transformer of 300 million parameters in one precision: seconds, device memory, the loss that is reached."""

import argparse
import json
import statistics
import time
import warnings

import torch
from device import CPU, DEVICE, finish
from torch import nn

from accelerate import Accelerator

warnings.simplefilter("ignore")
WIDTH, LAYERS, HEADS, VOCABULARY = (256, 2, 4, 1024) if CPU else (1024, 24, 16, 4096)
ROWS, LENGTH, WARM = (2, 64, 2) if CPU else (8, 1024, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.into(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words):
        return self.head(self.blocks(self.tokens(words) + self.places.weight))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="no", choices=("no", "fp16", "bf16", "fp8"))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    handlers = []
    if arguments.precision == "fp8":
        from accelerate.utils import AORecipeKwargs

        handlers = [AORecipeKwargs()]
    accelerator = Accelerator(cpu=CPU, mixed_precision=arguments.precision, kwargs_handlers=handlers)
    model = Words()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    words = torch.randint(VOCABULARY, (4, ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    times, losses = [], []
    for step in range(WARM + arguments.steps):
        if step == WARM and not CPU:
            torch.cuda.reset_peak_memory_stats()
        finish()
        start = time.perf_counter()
        batch = words[step % len(words)]
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(-1, 1).flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        finish()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    figures = {"a step (ms)": statistics.median(times[WARM:]) * 1e3}
    if not CPU:
        figures["peak memory (MiB)"] = torch.cuda.max_memory_allocated() / 2**20
    figures |= {"first loss": losses[0], "last loss": losses[-1]}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
