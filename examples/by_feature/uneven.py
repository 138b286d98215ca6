"""Ranks with different numbers of batches: no sample is repeated or dropped, and no rank waits forever.

By default the last batch of an epoch is filled with samples from its beginning, so all ranks take equally many steps. With
`even_batches=False` each rank reads its own part and nothing twice; a rank may then have a batch less, and the exchange of gradients
would wait for it. `join_uneven_inputs` answers for the ranks that are done (DDP alone: sharded models cannot do without a rank).

    accelerate launch --cpu --num_processes 2 examples/by_feature/uneven.py

Prints: 3 batches on rank 0, 2 on rank 1, 138 samples seen once each, weights equal on all ranks: True
"""

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

SAMPLES = 138  # batches of 32: 32 + 32 + 32 + 32 + 10


def main() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    set_seed(0)
    wine = load_wine()
    features = torch.tensor(wine.data, dtype=torch.float32)
    features = (features - features.mean(dim=0)) / features.std(dim=0)
    order = torch.randperm(len(features))[:SAMPLES]  # the file is sorted by class
    rows = TensorDataset(order, features[order], torch.tensor(wine.target)[order])
    model = nn.Linear(features.shape[1], 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32))

    seen = []
    with accelerator.join_uneven_inputs([model]):
        for numbers, batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(numbers)
    # Ranks have lists of different lengths: gather them as objects, not as tensors.
    of_ranks = accelerator.gather_for_metrics([[batch.tolist() for batch in seen]], use_gather_object=True)
    batches = [len(each) for each in of_ranks]
    numbers = sorted(number for each in of_ranks for batch in each for number in batch)

    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach()[None])
    equal = bool((weights == weights[0]).all()) and numbers == sorted(order.tolist())
    accelerator.print(
        f"{batches[0]} batches on rank 0, {batches[1]} on rank 1, {len(numbers)} samples seen once each, "
        f"weights equal on all ranks: {equal}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
