"""Find the step at which replicas diverge, and what differs first.

Data parallelism holds because all ranks take the same step. A learning rate that depends on the rank, a module that only some ranks
change, or a wrong seed breaks that silently: the loss looks fine, and each rank has another model. `ACCELERATE_CHECK_EVERY=N` compares
learning rates and checksums before each N-th step. Here rank 1 gets another learning rate after three steps.

    ACCELERATE_CHECK_EVERY=1 accelerate launch --cpu --num_processes 2 examples/by_feature/diverge.py

Prints: all ranks raise at the step after the change, and the message names the learning rate: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.extensions.checks.replicas import ReplicasDiffer
from accelerate.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32, shuffle=True))

    steps, message = 0, ""
    try:
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            if steps == 3 and accelerator.process_index == 1:
                optimizer.param_groups[0]["lr"] = 0.2  # the fault
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    except ReplicasDiffer as error:
        message = str(error)
        accelerator.print(message)

    found = steps == 3 and "learning rate" in message and "rank 1" in message
    everywhere = accelerator.reduce(torch.tensor(float(found)), "sum").item() == accelerator.num_processes
    accelerator.print(
        f"all ranks raise at the step after the change, and the message names the learning rate: {everywhere}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
