"""Training in a pipeline: each rank has a stage of the model.

For a model of which one rank cannot hold all layers. `prepare_pipeline` divides it where the most costly stage is cheapest. A call takes a
whole batch, runs forward and backward, and returns the loss on every rank. The losses equal those of one process with the same batches, the
last one of which is shorter; the state has the names of the whole model.

    accelerate launch --cpu --num_processes 2 examples/by_feature/pipeline_train.py

Prints: 2 stages, same curve and same weights as one process: True
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import set_seed

BATCH, PARTS = 64, 4


class Block(nn.Module):
    """A wide layer and its way back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.down(torch.relu(self.up(states)))


class Classifier(nn.Module):
    """Blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(64) for _ in range(4)])
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images)


def alone(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Train on one process, and return the loss of each step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    set_seed(0)  # the same weights on all ranks
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32)[:500] / 16, torch.tensor(digits.target)[:500])
    model = Classifier()
    whole = copy.deepcopy(model)

    pipeline = accelerator.prepare_pipeline(
        model,
        schedule="1F1B",
        microbatches=PARTS,
        example_args=(torch.zeros(BATCH // PARTS, 64),),  # one micro-batch
        loss=nn.functional.cross_entropy,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(rows, batch_size=BATCH))
    losses = []
    for images, targets in loader:  # the same batch on both ranks
        losses.append(pipeline(images, target=targets))
        accelerator.clip_grad_norm_(pipeline.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    expected = alone(whole, DataLoader(rows, batch_size=BATCH))
    same = torch.allclose(torch.stack(losses).cpu(), expected, atol=1e-4)
    state = accelerator.get_state_dict(pipeline)  # on rank 0
    if accelerator.is_main_process:
        print(f"rank 0 has {sorted({name.rpartition('.')[0] for name in pipeline.state_dict()})}")
        same = same and all(
            torch.allclose(state[name], value, atol=1e-4) for name, value in whole.state_dict().items()
        )
        print(f"2 stages, same curve and same weights as one process: {same}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
