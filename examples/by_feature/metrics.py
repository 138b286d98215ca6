"""Exact metrics where the samples do not divide by the ranks.

Every collective needs equal shapes on all ranks, so a prepared loader fills up its last batch with samples of the first one.
`gather` returns those too; `gather_for_metrics` leaves them out. For a sum there is `reduce`, for tensors of unequal lengths
`pad_across_processes`, for any picklable objects `gather_for_metrics(..., use_gather_object=True)`.

    accelerate launch --cpu --num_processes 2 examples/by_feature/metrics.py

Prints: 569 samples on 2 ranks, each counted once, metrics equal those of one process: True
"""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import confusion_matrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    data = load_breast_cancer()
    features = torch.tensor(data.data, dtype=torch.float32)
    features = (features - features.mean(dim=0)) / features.std(dim=0)
    rows = TensorDataset(features, torch.tensor(data.target))
    model = nn.Linear(features.shape[1], 2)
    alone = model(features).argmax(dim=1)  # what one process says of all samples
    # Batches of 64 on two ranks: the last step has 57 samples for 128 places.
    model, loader = accelerator.prepare(model, DataLoader(rows, batch_size=64))

    guesses, targets, with_repeats = [], [], 0
    for batch, target in loader:
        with torch.no_grad():
            logits = model(batch)
        with_repeats += len(accelerator.gather(target))
        guess, target = accelerator.gather_for_metrics((logits.argmax(dim=1), target))
        guesses.append(guess)
        targets.append(target)
    guesses, targets = torch.cat(guesses).cpu(), torch.cat(targets).cpu()
    accelerator.print(f"gather returned {with_repeats} labels, gather_for_metrics {len(targets)}")

    # A number of your own: each rank counts its part, and `reduce` adds the counts up.
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    counts = torch.tensor([float((guesses[mine] == targets[mine]).sum()), float(len(targets[mine]))])
    right, seen = accelerator.reduce(counts.to(accelerator.device), "sum").tolist()
    accelerator.print(f"accuracy of the untrained model: {right / seen:.3f}")

    # A metric that is no mean (a confusion matrix, F1, AUC) needs all predictions in one place.
    table = confusion_matrix(targets, guesses)
    exact = (table == confusion_matrix(data.target, alone)).all() and seen == len(data.target)
    ranks = accelerator.num_processes
    accelerator.print(
        f"{len(targets)} samples on {ranks} ranks, each counted once, metrics equal those of one process: {exact}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
