"""Find a batch size that fits into memory, together on all ranks, and keep the global batch.

The decorated function is called again with a smaller batch size as long as memory runs out. With
`keep_global_batch=True` the accumulation steps grow as the batch shrinks, so learning rate and number of updates stay right. What the
function builds must be built inside it. Memory is pretended here: more than 20 samples do not fit.

    accelerate launch --cpu --num_processes 2 examples/by_feature/batch_size.py

Prints: 64 samples did not fit; both ranks train with 16 x 4, and the updates stay 15: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, find_executable_batch_size
from accelerate.utils import set_seed

FITS = 20


def main() -> None:
    accelerator = Accelerator()
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    tried = []

    @find_executable_batch_size(starting_batch_size=64, accelerator=accelerator, keep_global_batch=True)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        set_seed(0)
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=batch_size))
        updates = 0
        for images, targets in loader:
            if len(images) > FITS:
                raise torch.OutOfMemoryError("pretended: these samples do not fit")
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), targets))
                optimizer.step()
                optimizer.zero_grad()
                updates += accelerator.sync_gradients
        return updates

    updates = train()
    sizes = accelerator.gather(torch.tensor([tried[-1]], device=accelerator.device)).tolist()
    steps = accelerator.gradient_accumulation_steps
    accelerator.print(f"tried {tried}; {steps} accumulation steps")
    shown = sizes == [16, 16] and steps == 4
    accelerator.print(
        f"64 samples did not fit; both ranks train with {sizes[0]} x {steps}, and the updates stay {updates}: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
