"""Save a checkpoint in the background while the training continues.

`save_state(blocking=False)` copies the state and returns; a thread writes, checks and publishes it. What is saved is the state at the
call, whatever the training does meanwhile. `wait_for_checkpoint` waits for the end of it, and raises if it failed on any rank; the
next `save_state` and `end_training` do that as well. A process that is killed in between leaves the previous checkpoint in place.

    accelerate launch --cpu --num_processes 2 examples/by_feature/async_save.py

Prints: trained on during the save; the checkpoint has the weights of the call, not the final ones: True
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=32, shuffle=True))

    for step, (images, targets) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(images), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 10:
            at_the_call = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            accelerator.save_state("out/async_save", blocking=False)  # returns when the state is copied
    at_the_end = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.wait_for_checkpoint()  # complete, and in its place

    accelerator.load_state("out/async_save")
    loaded = model.state_dict()
    of_the_call = all(torch.equal(loaded[name], tensor) for name, tensor in at_the_call.items())
    of_the_end = any(torch.equal(loaded[name], tensor) for name, tensor in at_the_end.items())
    shown = of_the_call and not of_the_end
    accelerator.print(
        f"trained on during the save; the checkpoint has the weights of the call, not the final ones: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
