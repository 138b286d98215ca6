"""Local SGD: ranks train separately for eight steps, and then average their weights.

Inside `LocalSGD` gradients stay on their rank. It exchanges the bytes of the weights once per eight steps instead of those of the
gradients in each one, for networks that are slow. The ranks' weights differ in between, so the result is that of another
algorithm, not of data parallelism.

    accelerate launch --cpu --num_processes 2 examples/by_feature/local_sgd.py

Prints: weights differ within 8 local steps, are equal after the average, and the loss falls: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed

LOCAL_STEPS = 8


def spread(accelerator: Accelerator, model: nn.Module) -> float:
    """Return the largest difference of a weight between the ranks. Collective: call on every rank."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    all_ranks = accelerator.gather(weights[None])
    return (all_ranks - all_ranks[0]).abs().max().item()


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32, shuffle=True))

    spreads, losses = [], []
    with LocalSGD(accelerator, model, local_sgd_steps=LOCAL_STEPS) as local_sgd:
        for step, (images, targets) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()  # averages after steps 8, 16, ...
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if step in (LOCAL_STEPS - 2, LOCAL_STEPS - 1):
                spreads.append(spread(accelerator, model))
    spreads.append(spread(accelerator, model))  # leaving the context averages, too
    accelerator.print(f"largest difference after steps 7, 8 and at the end: {spreads}")
    accelerator.print(
        f"loss: {losses[0]:.3f}, then {losses[-1]:.3f}; averages of weights: {-(-len(losses) // LOCAL_STEPS)}"
    )
    shown = spreads[0] > 0 and spreads[1] < 1e-6 and spreads[2] < 1e-6 and losses[-1] < 0.9 * losses[0]
    accelerator.print(
        f"weights differ within {LOCAL_STEPS} local steps, are equal after the average, and the loss falls: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
