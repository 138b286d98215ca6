"""Worker processes forked at each epoch's beginning, straight after collectives and a backward pass, all come alive."""

import torch
from harness import fresh_accelerator
from torch import nn
from torch.utils.data import DataLoader

EPOCHS, LIMIT_S = 40, 30


def main():
    accelerator = fresh_accelerator()
    # A worker that hangs in `os.fork` shows as a loader that times out.
    loader = DataLoader(torch.randn(8, 4), batch_size=2, shuffle=True, num_workers=2, timeout=LIMIT_S)
    model, loader = accelerator.prepare(nn.Linear(4, 1), loader)
    for _ in range(EPOCHS):
        for batch in loader:
            accelerator.backward(model(batch).sum())
    accelerator.print("ok all")


if __name__ == "__main__":
    main()
